"""The engine on packed graphs, run by the reference and, with a GPU, by the kernels; the way to a
device, on that which is here.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cloze.export.graph.session import ReferenceSession
from cloze.model_store import Bundle, Store
from cloze.model_store.batch import BatchCodec, Encoding, HeadOutputs
from cloze.model_store.manifest import Graph, Precision
from cloze.service.core import Device, RequestedPrecision
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.engine.session import DeviceSession, Session, cpu_session
from cloze.service.errors import StartupError
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.conftest import has_gpu
from tests.support import encodings
from tests.support.faulty import numbers


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="reference"),
        pytest.param(True, id="cuda", marks=pytest.mark.gpu),
    ],
)
def on_cuda(request: pytest.FixtureRequest) -> bool:
    """Return whether CUDA's kernels run packed graphs; if not, their reference runs them."""
    if request.param and not has_gpu():
        pytest.skip("no GPU: its driver (libcuda.so.1) is not there or finds none")
    return bool(request.param)


class Packed(OnnxEngine):
    """The engine as on CUDA, its graph run by the reference where there is none; remembers its
    batches.
    """

    def __init__(
        self, bundle: Bundle, precision: RequestedPrecision = "auto", *, cuda: bool = False
    ) -> None:
        def by_reference(bundle: Bundle, graph: Graph) -> Session:
            return ReferenceSession(bundle.file(graph.file))

        super().__init__(
            bundle, Device.CUDA, precision, open_session=None if cuda else by_reference
        )
        self.batches: list[list[Encoding]] = []

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        self.batches.append(list(batch))
        return super().run(batch)


def test_on_cuda_the_packed_graph_is_taken(packed_store: Path, on_cuda: bool) -> None:
    engine = Packed(Store(packed_store).open("bert"), cuda=on_cuda)
    assert (engine.device, engine.precision, engine.supports_varlen) == (Device.CUDA, "fp16", True)
    assert engine.reason == "since the device is a GPU and the bundle's gate was passed"
    with pytest.raises(StartupError, match=r"int8 was asked for, which runs on a CPU only"):
        Packed(Store(packed_store).open("bert"), precision=Precision.INT8)


def test_fp16_is_for_cuda_and_must_be_there(packed_store: Path, tiny_store: Path) -> None:
    with pytest.raises(StartupError, match=r"fp16 was asked for, which runs on CUDA only"):
        OnnxEngine(Store(packed_store).open("bert"), Device.CPU, Precision.FP16)
    with pytest.raises(StartupError, match=r"has no fp16 graph; export it with --precision fp16"):
        Packed(Store(tiny_store).open("bert"), precision=Precision.FP16)


def test_goldens_are_those_of_the_packed_graph(
    packed_store: Path, on_cuda: bool, tmp_path: Path
) -> None:
    """A bundle whose packed weights are not what they were is refused at the start."""
    bundle = Store(shutil.copytree(packed_store, tmp_path / "store")).open("bert")
    file = bundle.file("weights-fp16.bin")
    halves = np.frombuffer(file.read_bytes(), np.float16).copy()
    halves[::3] = 0
    file.write_bytes(halves.tobytes())
    with pytest.raises(StartupError, match=r"does not reproduce its golden outputs"):
        Packed(Bundle(bundle.manifest, bundle.path), cuda=on_cuda)


COMPARED = (
    ("masked_lm", "logsumexp"),
    ("masked_lm", "target_logits"),
    ("next_sentence", "array"),
    ("embedding", "array"),
    ("masked_lm", "top_logits"),
)
"""Heads and the fields of their results; not ids, which differ where logits are nearly equal."""


asked_of_batches = st.lists(
    st.tuples(
        st.integers(3, 40),
        st.sampled_from(["masks", "pair", "embed", "all", "nothing"]),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=7,
)


def make_encoding(length: int, kind: str, seed: int) -> Encoding:
    rng = np.random.default_rng(seed)
    masked = kind in ("masks", "all")
    return encodings.encoding(
        rng.integers(5, 100, length, dtype=np.int32),
        np.arange(length) > length // 2,
        masks=rng.choice(length, 2, replace=False).tolist() if masked else (),
        top_k=1 + seed % 4 if masked else 0,
        targets=[7, 9, 11][: seed % 3] if masked else (),
        pair=kind in ("pair", "all"),
        embed=kind in ("embed", "all"),
    )


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(asked=asked_of_batches)
def test_a_mixed_batch_is_answered_as_each_encoding_alone_on_a_cpu(
    packed_store: Path, on_cuda: bool, asked: list[tuple[int, str, int]]
) -> None:
    """Any lengths and any heads in one batch; fp32 in the dense layout knows the answer."""
    bundle = Store(packed_store).open("bert")
    packed, dense = Packed(bundle, cuda=on_cuda), OnnxEngine(bundle, Device.CPU)
    batch = [make_encoding(*one) for one in asked]
    for encoding, output in zip(batch, packed.run(batch), strict=True):
        alone = dense.run([encoding])[0]
        assert output.keys() == alone.keys() == encoding.requests.keys()
        for head, name in COMPARED:
            if head in output:
                one, other = getattr(output[head], name), getattr(alone[head], name)
                assert one.shape == other.shape, name
                atol = 0.02 * max(1, np.abs(other).max(initial=0))
                np.testing.assert_allclose(one, other, atol=atol, err_msg=name)


def test_every_route_answers_and_batches_mix_lengths(packed_store: Path, on_cuda: bool) -> None:
    engines: dict[str, Packed] = {}

    def make(bundle: Bundle, _: Device, precision: RequestedPrecision) -> Packed:
        return engines.setdefault(bundle.manifest.name, Packed(bundle, precision, cuda=on_cuda))

    settings = {"model_store": packed_store, "max_batch_tokens": 4096}
    dense = single_process(load_settings({"model_store": packed_store, "device": "cpu"}))
    packed = single_process(load_settings(settings), make)
    masked = ["the [MASK] sat", "a cat sat on the [MASK] and the [MASK] ran"]
    pairs = [{"text": "the cat sat", "next": "the dog ran"}, {"text": "a", "next": "the cat sat"}]
    asked = {
        "/fill-mask": {"inputs": masked, "parameters": {"top_k": 3}},
        "/embed": {"inputs": ["a", "the cat sat", "the dog ran and the cat sat on the mat"]},
        "/nsp": {"inputs": pairs},
        "/qa": {"inputs": {"question": "who sat", "context": "the cat sat and the dog ran"}},
    }
    with (
        TestClient(dense, base_url="http://localhost") as one,
        TestClient(packed, base_url="http://localhost") as other,
    ):
        for route, body in asked.items():
            expected, actual = (client.post(route, json=body) for client in (one, other))
            assert (expected.status_code, actual.status_code) == (200, 200), actual.text
            assert numbers(expected.json()) == pytest.approx(numbers(actual.json()), abs=0.02)
    together = [batch for batch in engines["bert"].batches if len(set(map(len, batch))) > 1]
    assert together, "unlike lengths ran in one batch"


@pytest.mark.parametrize("model", ["bert", "bert-qa"])
def test_the_way_to_a_device_gives_what_the_session_gives(model: str, tiny_store: Path) -> None:
    """Inputs in one copy into buffers that are used again, by several threads, with shapes that
    change.
    """
    bundle = Store(tiny_store).open(model)
    manifest = bundle.manifest
    file = bundle.file(manifest.graph.file)
    plain = cpu_session(file)
    device = DeviceSession(ort.InferenceSession(file, providers=["CPUExecutionProvider"]), "cpu", 0)
    wanted = [output.name for output in plain.get_outputs()]
    pack = BatchCodec(manifest.graph_spec(manifest.graph.layout)).pack

    def check(number: int) -> None:
        kinds = ["all", "masks", "nothing", "embed"] if model == "bert" else ["nothing"]
        batch = [
            make_encoding(3 + number % 30, kinds[(number + i) % len(kinds)], number + i)
            for i in range(1 + number % 5)
        ]
        feeds = pack(batch).feeds
        for name, one, other in zip(
            wanted, plain.run(wanted, feeds), device.run(wanted, feeds), strict=True
        ):
            np.testing.assert_array_equal(one, other, err_msg=name)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(check, range(120)))
