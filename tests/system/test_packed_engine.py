"""The engine on packed graphs, run by the reference and, with a GPU, by the kernels; the way to a
device, on that which is here.
"""

import ctypes
import os
import shutil
import subprocess
import sys
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
from cloze.model_store.heads import HEADS, Head
from cloze.model_store.manifest import Graph, Precision
from cloze.service.batching.cost import BatchCostModel, largest_batch, measure_cost
from cloze.service.core import (
    MAX_BATCH_VOCABULARY_ROWS,
    MAX_PADDING_FACTOR,
    Device,
    RequestedPrecision,
)
from cloze.service.engine import session as sessions
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.engine.session import DeviceSession, Session, cpu_session
from cloze.service.errors import StartupError
from cloze.service.models.served_models import batch_tokens
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from tests.support import encodings
from tests.support.fake_engine import FakeEngine
from tests.support.virtual_time import VirtualClock


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


def numbers(answer: object) -> list[float]:
    """All scores and vectors of an answer, in order; not ids and offsets, which are not near each
    other when they differ.
    """
    if isinstance(answer, dict):
        return [
            number
            for key, part in answer.items()
            if key not in ("token", "start", "end")
            for number in numbers(part)
        ]
    if isinstance(answer, list):
        return [number for part in answer for number in numbers(part)]
    return [answer] if isinstance(answer, float) else []


def test_every_route_answers_and_batches_mix_lengths(packed_store: Path, on_cuda: bool) -> None:
    engines: dict[str, Packed] = {}

    def make(bundle: Bundle, _: Device, precision: RequestedPrecision) -> Packed:
        return engines.setdefault(bundle.manifest.name, Packed(bundle, precision, cuda=on_cuda))

    settings = {"model_store": packed_store, "max_batch_tokens": 4096}
    dense = single_process(load_settings({"model_store": packed_store, "device": "cpu"}))
    packed = single_process(load_settings(settings), make)
    asked = {
        "/fill-mask": {
            "inputs": ["the [MASK] sat", "a cat sat on the [MASK] and the [MASK] ran"],
            "parameters": {"top_k": 3},
        },
        "/embed": {"inputs": ["a", "the cat sat", "the dog ran and the cat sat on the mat"]},
        "/nsp": {
            "inputs": [
                {"text": "the cat sat", "next": "the dog ran"},
                {"text": "a", "next": "the cat and the dog sat"},
            ]
        },
        "/qa": {"inputs": {"question": "who sat", "context": "the cat sat and the dog ran"}},
    }
    with (
        TestClient(dense, base_url="http://localhost") as one,
        TestClient(packed, base_url="http://localhost") as other,
    ):
        for route, body in asked.items():
            expected, actual = (client.post(route, json=body) for client in (one, other))
            assert (expected.status_code, actual.status_code) == (200, 200), actual.text
            for one_number, other_number in zip(
                numbers(expected.json()), numbers(actual.json()), strict=True
            ):
                assert one_number == pytest.approx(other_number, abs=0.02)
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


class CudaRuntime:
    """As much of CUDA's runtime as `page_locked` calls, on the host's own memory."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.memory, self.calls = fails, ctypes.create_string_buffer(64), list[str]()

    def cudaSetDevice(self, device_id: int) -> int:  # noqa: N802
        self.calls.append(f"device {device_id}")
        return 0

    def cudaMallocHost(self, place: object, _: ctypes.c_size_t) -> int:  # noqa: N802
        place._obj.value = 0 if self.fails else ctypes.addressof(self.memory)  # type: ignore[attr-defined]
        return 2 if self.fails else 0

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls.append("error taken back")
        return 2

    def cudaFreeHost(self, _: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls.append("freed")
        return 0


def test_page_locked_memory_is_given_back_and_a_refusal_leaves_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given, refused = CudaRuntime(fails=False), CudaRuntime(fails=True)
    monkeypatch.setattr(sessions, "runtime", lambda: given)
    array = sessions.page_locked(64, 1)
    assert array is not None
    array[:3] = (7, 8, 9)
    assert given.memory.raw[:3] == bytes((7, 8, 9))
    del array
    assert given.calls == ["device 1", "freed"]
    monkeypatch.setattr(sessions, "runtime", lambda: refused)
    assert sessions.page_locked(64, 0) is None
    assert refused.calls == ["device 0", "error taken back"]


def heads_with(*, masks: bool) -> list[Head]:
    """Return the heads of a graph that embeds, and maybe predicts masks."""
    return [HEADS["embedding"], *([HEADS["masked_lm"]] if masks else [])]


class Timed(FakeEngine, VirtualClock):
    """An engine, and its clock, whose time is computed, and whose memory ends: it takes so much for each token and
    each cell to gather from.
    """

    supports_varlen = True

    def __init__(self, cost: BatchCostModel, memory: int = 10**9) -> None:
        super().__init__()
        self.cost, self.memory, self.now = cost, memory, 0.0
        self.taken: list[int] = []

    def run(self, batch: Sequence[Encoding], *, alone: bool = False) -> list[HeadOutputs]:
        lengths = [len(encoding) for encoding in batch]
        self.taken.append(
            sum(lengths)
            + len(batch) * max(lengths)
            + sum(encoding.vocabulary_rows for encoding in batch)
        )
        if self.taken[-1] > self.memory:
            raise RuntimeError("out of memory")
        self.now += self.cost.fixed + self.cost.per_token * sum(lengths)
        return []


@pytest.mark.parametrize(
    "cost", [BatchCostModel(5e-4, 4e-7), BatchCostModel(2e-3, 1e-6), BatchCostModel(1e-5, 3e-6)]
)
def test_costs_are_found_by_measuring(cost: BatchCostModel) -> None:
    engine = Timed(cost)
    found = measure_cost(engine, (), 512, engine)
    for one, other in ((found.fixed, cost.fixed), (found.per_token, cost.per_token)):
        assert one == pytest.approx(other, rel=0.01, abs=1e-12)


def test_no_batch_is_larger_than_one_that_ran(caplog: pytest.LogCaptureFixture) -> None:
    """And the one that takes most memory ran first."""
    engine = Timed(BatchCostModel(5e-4, 4e-7), memory=25_000)
    found = measure_cost(engine, heads_with(masks=True), 512, engine)
    assert found.per_token == pytest.approx(4e-7, rel=0.01)
    assert found.batch_tokens(0.1) == found.max_tokens == 4096
    assert [taken > engine.memory for taken in engine.taken] == [True, True] + [False] * (
        len(engine.taken) - 2
    )
    assert engine.taken[2] == max(engine.taken[2:])
    assert [
        record.getMessage().split(" of ")[1].split(" tokens")[0] for record in caplog.records
    ] == ["16384", "8192"]
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_cost(Timed(BatchCostModel(5e-4, 4e-7), memory=100), (), 512)


@settings(deadline=None)
@given(
    max_tokens=st.integers(3, 512),
    budget=st.integers(1, 20_000),
    lengths=st.lists(st.integers(3, 512), min_size=1, max_size=60),
    masks=st.booleans(),
)
def test_the_largest_batch_is_one_that_the_scheduler_makes(
    max_tokens: int, budget: int, lengths: list[int], masks: bool
) -> None:
    largest = largest_batch(heads_with(masks=masks), max_tokens, budget)
    sizes = [len(encoding) for encoding in largest]
    assert max(sizes) == sizes[0] == max_tokens
    assert len(sizes) == 1 or (
        sum(sizes) <= budget and len(sizes) * max_tokens <= MAX_PADDING_FACTOR * budget
    )
    assert sum(encoding.vocabulary_rows for encoding in largest) == (
        MAX_BATCH_VOCABULARY_ROWS if masks else 0
    )
    # No batch of the scheduler's gathers from many more cells than this one.
    batch: list[int] = []
    for length in (min(length, max_tokens) for length in lengths):
        if (
            sum(batch) + length > budget
            or (len(batch) + 1) * max([*batch, length]) > MAX_PADDING_FACTOR * budget
        ):
            break
        batch.append(length)
    if batch:
        assert len(batch) * max(batch) <= len(sizes) * max_tokens + max(max_tokens, budget)


def test_a_batch_that_was_asked_for_and_does_not_fit_stops_the_start(tiny_store: Path) -> None:
    bundle, engine = (
        Store(tiny_store).open("bert"),
        Timed(BatchCostModel(5e-4, 4e-7), memory=22_000),
    )
    assert batch_tokens(bundle, engine, load_settings({"max_batch_tokens": 4096})) == 4096
    assert len(engine.taken) == 1, "it ran one"
    words = r"does not run the largest batch of the 8192 tokens that max_batch_tokens asks for: out of memory"
    with pytest.raises(StartupError, match=words):
        batch_tokens(bundle, engine, load_settings({"max_batch_tokens": 8192}))


@pytest.mark.parametrize(
    ("cost", "objective_s", "tokens"),
    [
        (BatchCostModel(5e-4, 1e-6), 0.020, 9500),  # the fixed part is a twentieth of a batch
        (BatchCostModel(5e-4, 1e-5), 0.005, 512),  # the objective allows 450: the least
        (BatchCostModel(5e-4, 1e-5), 0.010, 950),
        (BatchCostModel(5e-3, 1e-7), 1.0, 16384),  # the most that is tried
        (BatchCostModel(5e-4, 0.0), 0.02, 16384),
    ],
)
def test_a_batch_holds_what_pays_and_what_the_objective_allows(
    cost: BatchCostModel, objective_s: float, tokens: int
) -> None:
    assert cost.batch_tokens(objective_s) == pytest.approx(tokens, abs=1)


def test_both_builds_of_the_runtime_are_one_too_many(tmp_path: Path, tiny_store: Path) -> None:
    """They overwrite each other's files; which of them is left is chance."""
    metadata = tmp_path / "onnxruntime_gpu-1.27.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.27.0\n"
    )
    command = [
        sys.executable,
        "-m",
        "cloze",
        "serve",
        "--port",
        "0",
        "--model-store",
        str(tiny_store),
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "both onnxruntime and onnxruntime-gpu are installed" in done.stderr
    assert "Traceback" not in done.stderr
