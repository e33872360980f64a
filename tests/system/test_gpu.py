"""What only a GPU can show: where nodes run, memory that ends, the server on it.

`make test-gpu` runs these and the packed tests.
"""

from pathlib import Path

import httpx
import numpy as np
import pytest

from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding
from cloze.service.core import Device
from cloze.service.engine import session
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
from tests.conftest import has_gpu
from tests.support.encodings import encoding
from tests.support.profiling import placed, profiled
from tests.support.serving import running_server
from tests.system.test_packed_engine import numbers

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_gpu(), reason="no GPU: its driver is not there or finds none"),
]


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder where the sessions that a test opens write what they ran."""
    monkeypatch.setattr(session, "_options", profiled(str(tmp_path / "profile")))
    return tmp_path


def end(engine: OnnxEngine) -> None:
    """Have the engine's session write its profile."""
    inner = engine._session
    (inner._session if isinstance(inner, session.DeviceSession) else inner).end_profiling()


def make_batch(bundle: Bundle, sequences: int, length: int) -> list[Encoding]:
    """Return a batch in which some encodings ask each head of the bundle."""
    tasks = bundle.manifest.tasks
    return [
        encoding(
            [5] * length,
            masks=[1] if "fill-mask" in tasks and i % 3 == 0 else (),
            top_k=1 if "fill-mask" in tasks and i % 3 == 0 else 0,
            pair="nsp" in tasks and i % 3 == 1,
            embed="embed" in tasks and i % 3 == 2,
            span="qa" in tasks,
        )
        for i in range(sequences)
    ]


def test_a_profile_says_where_nodes_ran(tiny_store: Path, profile: Path) -> None:
    bundle = Store(tiny_store).open("bert")
    engine = OnnxEngine(bundle, Device.CPU)
    engine.run(make_batch(bundle, 4, 8))
    end(engine)
    operators = placed(profile.glob("profile*.json"))
    assert {operator.split()[0] for operator in operators} == {session.CPU}
    runs = len(engine._goldens) + 1
    assert (
        operators[f"{session.CPU} MultiHeadAttention"] == bundle.manifest.architecture.layers * runs
    )


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("name", ["bert", "bert-qa"])
    def test_every_node_runs_on_cuda(self, name: str, packed_store: Path, profile: Path) -> None:
        bundle = Store(packed_store).open(name)
        engine = OnnxEngine(bundle, Device.CUDA, "auto")
        engine.run(make_batch(bundle, 6, 30))
        end(engine)
        found = placed(profile.glob("profile*.json"))
        assert {operator.split()[0] for operator in found} == {session.CUDA}
        assert not [operator for operator in found if "Memcpy" in operator], (
            "nothing goes between host and device within a run"
        )
        assert found[f"{session.CUDA} PackedMultiHeadAttention"] > 0

    def test_memory_that_ends_is_an_error_and_not_the_end(self, packed_store: Path) -> None:
        bundle = Store(packed_store).open("bert")
        engine = OnnxEngine(
            bundle, Device.CUDA, "auto", options=SessionOptions(gpu_memory_limit=96 * 2**20)
        )
        small = make_batch(bundle, 6, 30)
        before = engine.run(small)
        with pytest.raises(Exception, match=r"(?i)memory|alloc"):
            engine.run(make_batch(bundle, 8000, 160))
        for one, other in zip(before, engine.run(small), strict=True):
            assert one.keys() == other.keys()
            if "embedding" in one:
                expected, actual = one["embedding"].array, other["embedding"].array
                np.testing.assert_allclose(actual, expected, atol=1e-3)

    @pytest.mark.parametrize(
        "arguments", [(), ("--frontends", "2")], ids=["one-process", "front-ends"]
    )
    def test_the_server_answers_as_on_a_cpu(
        self, arguments: tuple[str, ...], packed_store: Path
    ) -> None:
        asked = {
            "/embed": {
                "inputs": ["a", "the cat sat", "the dog ran and the cat sat on the mat"],
                "model": "bert",
            },
            "/nsp": {"inputs": [{"text": "the cat sat", "next": "the dog ran"}], "model": "bert"},
            "/fill-mask": {"inputs": ["the [MASK] sat"], "model": "bert"},
            "/qa": {
                "inputs": {"question": "who sat", "context": "the cat sat and the dog ran"},
                "model": "bert-qa",
            },
        }
        found = []
        for device in ("cpu", "cuda"):
            with running_server(packed_store, "--device", device, *arguments) as server:
                replies = {
                    path: httpx.post(server.url + path, json=body, timeout=60)
                    for path, body in asked.items()
                }
                assert all(reply.status_code == 200 for reply in replies.values()), replies
                found.append(replies)
                assert f" on {device} in " in "".join(server.log)
        for path in asked:
            one, other = (numbers(replies[path].json()) for replies in found)
            np.testing.assert_allclose(one, other, atol=0.02, err_msg=path)
