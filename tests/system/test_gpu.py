"""What only a GPU can show: where nodes run, memory that ends, the server on it.

`make test-gpu` runs these and the packed tests.
"""

from pathlib import Path

import numpy as np
import pytest

from cloze.model_store import Store
from cloze.service.core import Device
from cloze.service.engine import session
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
from tests.conftest import has_gpu
from tests.support import encodings
from tests.support.profiling import placed, profiled

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


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize("name", ["bert", "bert-qa"])
    def test_every_node_runs_on_cuda(self, name: str, packed_store: Path, profile: Path) -> None:
        bundle = Store(packed_store).open(name)
        engine = OnnxEngine(bundle, Device.CUDA, "auto")
        engine.run(encodings.of_tasks(bundle.manifest.tasks, 6, 30))
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
        small = encodings.of_tasks(bundle.manifest.tasks, 6, 30)
        before = engine.run(small)
        with pytest.raises(Exception, match=r"(?i)memory|alloc"):
            engine.run(encodings.of_tasks(bundle.manifest.tasks, 8000, 160))
        for one, other in zip(before, engine.run(small), strict=True):
            assert one.keys() == other.keys()
            if "embedding" in one:
                expected, actual = one["embedding"].array, other["embedding"].array
                np.testing.assert_allclose(actual, expected, atol=1e-3)
