"""The engine on a graph made by hand: its device, its golden outputs, and how it runs batches."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from cloze.model_store import Bundle
from cloze.model_store.installation import install_command
from cloze.model_store.layouts import Feeds
from cloze.model_store.manifest import Precision
from cloze.service.batching.admission import SchedulerLimits
from cloze.service.core import Device
from cloze.service.engine import session as sessions
from cloze.service.engine.cpu_places import SpreadSession
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
from cloze.service.engine.session import CUDA, CpuSession
from cloze.service.errors import EngineFailed, StartupError
from tests.support.encodings import encoding, later, submit
from tests.support.fake_engine import running
from tests.support.mean_graph import TABLE, mean, write_graph
from tests.support.task_model import manifest

IDS = [[1, 2, 3], [4, 5, 6]]


def golden(ids: Sequence[Sequence[int]], off: float = 0.0) -> dict[str, Any]:
    feeds = {
        "input_ids": ids,
        "token_type_ids": np.zeros_like(ids).tolist(),
        "embed_sequences": list(range(len(ids))),
    }
    outputs = np.array([mean(each) for each in ids])
    outputs[-1, -1] += off
    return {"feeds": feeds, "outputs": {"embeddings": outputs.tolist()}}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    write_graph(tmp_path / "g.onnx")
    (tmp_path / "golden.json").write_text(json.dumps([golden(IDS), golden([[7, 8]])]))
    return Bundle(manifest(tasks=["embed"]), tmp_path)


def embeddings(engine: OnnxEngine, *ids: Sequence[int], alone: bool = False) -> list[list[float]]:
    batch = [encoding(each, embed=True) for each in ids]
    outputs = engine.run(batch, alone=alone)
    return [output["embedding"].array.tolist() for output in outputs]


class Scripted:
    """A session that computes the graph with an error, and counts its runs."""

    def __init__(self, off: float = 0.0) -> None:
        self.off, self.runs = off, 0

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        assert wanted == ["embeddings"]
        self.runs += 1
        pooled = TABLE[feeds["input_ids"]].mean(1) + np.float32(self.off)
        return [pooled[feeds["embed_sequences"]]]


def test_an_engine_on_a_cpu(bundle: Bundle) -> None:
    engine = OnnxEngine(bundle, Device.CPU)
    assert (engine.device, engine.precision) == (Device.CPU, Precision.FP32)
    assert (engine.reason, engine.supports_varlen) == ("as asked", False)
    for ids in ([[1, 2], [3, 4]], [[9]]):
        np.testing.assert_allclose(
            embeddings(engine, *ids), [mean(each) for each in ids], rtol=1e-5
        )
    engine.probe()
    assert OnnxEngine(bundle, Device.CPU, "auto").reason == "since the bundle has nothing else"
    with pytest.raises(StartupError, match="has no int8 graph; export it with --precision int8"):
        OnnxEngine(bundle, Device.CPU, Precision.INT8)


@pytest.mark.parametrize(
    ("number", "off"), [(0, 2e-4), (1, 2e-4), (0, -2e-4)], ids=["first", "second", "below"]
)
def test_golden_outputs_must_come_out(bundle: Bundle, number: int, off: float) -> None:
    cases = [golden(IDS), golden([[7, 8]])]
    cases[number] = golden(cases[number]["feeds"]["input_ids"], off)
    (bundle.path / "golden.json").write_text(json.dumps(cases))
    with pytest.raises(StartupError, match=r"embeddings is off by 2.0e-04, more than 1e-04"):
        OnnxEngine(bundle, Device.CPU)
    for text in ("[]", None):
        (bundle.path / "golden.json").unlink()
        if text:
            (bundle.path / "golden.json").write_text(text)
        with pytest.raises(StartupError, match=r"^bundle tiny@3: golden.json"):
            OnnxEngine(bundle, Device.CPU)


def test_a_probe_runs_the_first_golden_batch(bundle: Bundle) -> None:
    session = Scripted(0.9e-4)  # less than the tolerance
    engine = OnnxEngine(bundle, Device.CPU, open_session=lambda *_: session)
    assert session.runs == 2
    engine.probe()
    assert session.runs == 3
    session.off = 2e-4
    with pytest.raises(ValueError, match=r"embeddings is off by 2\.0e-04, more than 1e-04"):
        engine.probe()


def test_a_lone_batch_has_its_own_session(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    together, alone = Scripted(), Scripted()
    both = CpuSession(together, alone)
    engine = OnnxEngine(bundle, Device.CPU, open_session=lambda *_: both)
    embeddings(engine, [1, 2])
    assert (together.runs, alone.runs) == (3, 0), "a server without lone batches has one in memory"
    embeddings(engine, [1, 2], alone=True)
    assert (together.runs, alone.runs) == (3, 2), "the first golden batch runs alone too"
    embeddings(engine, [1, 2], alone=True)
    assert (together.runs, alone.runs) == (3, 3)
    together, alone = Scripted(), Scripted(2e-4)
    wrong = CpuSession(together, alone)
    engine = OnnxEngine(bundle, Device.CPU, open_session=lambda *_: wrong)
    for _ in range(2):
        embeddings(engine, [1, 2], alone=True)
    assert (together.runs, alone.runs) == (4, 1), "no answer is of a session that is wrong"
    assert "a lone request runs on one core: the golden outputs: " in caplog.text
    single = Scripted()
    engine = OnnxEngine(bundle, Device.CPU, open_session=lambda *_: single)
    embeddings(engine, [1, 2], alone=True)
    assert single.runs == 3


def test_a_graph_that_does_not_load_is_refused(bundle: Bundle) -> None:
    def fail(*_: object) -> Any:
        raise RuntimeError("no kernel\nfor it")

    with pytest.raises(StartupError, match=r"tiny@3: its graph does not load: no kernel$"):
        OnnxEngine(bundle, Device.CPU, open_session=fail)
    (bundle.path / "g.onnx").write_bytes(b"\x08\x0a")
    opened: list[object] = []
    with pytest.raises(StartupError, match="tiny@3: its graph does not load"):
        OnnxEngine(bundle, Device.CPU, open_session=lambda *each: opened.append(each))  # type: ignore[arg-type,return-value]
    assert opened == [], "a graph is checked before a runtime opens it"


def test_the_options_reach_the_session(bundle: Bundle) -> None:
    options = SessionOptions(threads=2, alone_threads=3)
    engine: Any = OnnxEngine(bundle, Device.CPU, options=options)
    assert engine._session.side_by_side.get_session_options().intra_op_num_threads == 2
    np.testing.assert_allclose(embeddings(engine, [1, 2], alone=True), [mean([1, 2])], rtol=1e-5)
    assert engine._alone is engine._session.alone
    assert engine._alone.get_session_options().intra_op_num_threads == 3


HUGE = 11
"""The id of a token whose vector overflows if it is added to itself."""


def test_numbers_that_overflow_are_the_error_of_their_text_alone(bundle: Bundle) -> None:
    """Other servers answer with vectors of null."""
    table = TABLE.copy()
    table[HUGE] = 3e38
    write_graph(bundle.path / "g.onnx", table)
    engine = OnnxEngine(bundle, Device.CPU)
    batch = [encoding(ids, embed=True) for ids in ([1, 2], [HUGE, HUGE], [3, HUGE])]
    with pytest.raises(FloatingPointError):
        engine.run(batch)
    limits = SchedulerLimits(
        workers=1, max_batch_tokens=64, max_queue_tokens=1000, stall_timeout_s=30.0
    )
    with running(engine, limits) as scheduler:
        request, other = submit(scheduler, batch, later()), submit(scheduler, batch[2:], later())
        error = request.exception(60)
        assert type(error) is EngineFailed
        expected = "the engine cannot run sequence 2 of 3 of this request (FloatingPointError)"
        assert str(error) == expected
        [result] = other.result(60).outputs
        expected_mean = table[[3, HUGE]].mean(0)
        np.testing.assert_allclose(result["embedding"].array, expected_mean, rtol=1e-5)
        assert scheduler.dead_reason is None


class OnCuda:
    """A session of onnxruntime as on a GPU; `fails` is raised instead."""

    fails: Exception | None = None
    providers = (CUDA, "CPUExecutionProvider")
    opened: list["OnCuda"]

    def __init__(self, file: Path, options: Any, providers: Any, enable_fallback: int) -> None:
        self.file, self.options, self.asked = file, options, providers
        self.enable_fallback = enable_fallback
        if CUDA in self.names and self.fails is not None:
            raise self.fails
        OnCuda.opened.append(self)

    @property
    def names(self) -> list[str]:
        return [each if isinstance(each, str) else each[0] for each in self.asked]

    def get_providers(self) -> list[str]:
        return list(self.providers) if CUDA in self.names else ["CPUExecutionProvider"]

    def run(self, wanted: Sequence[str], feeds: Feeds) -> list[NDArray[Any]]:
        return Scripted().run(wanted, feeds)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[OnCuda]:
    """Let onnxruntime be a build for CUDA, without a library of CUDA."""
    OnCuda.opened = []
    monkeypatch.setattr(OnCuda, "fails", None)
    monkeypatch.setattr(OnCuda, "providers", (CUDA, "CPUExecutionProvider"))
    monkeypatch.setattr(ort, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: print("no library"), raising=False)
    monkeypatch.setattr(ort, "InferenceSession", OnCuda)
    return OnCuda


def test_cuda_must_be_there_if_it_is_asked_for(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["A", "B"])
    with pytest.raises(StartupError, match="this onnxruntime has only A, B; uninstall"):
        OnnxEngine(bundle, Device.CUDA)
    engine = OnnxEngine(bundle, Device.AUTO)
    assert (engine.device, engine.reason) == (Device.CPU, "as asked")


def test_a_session_on_cuda(tmp_path: Path, cuda: type[OnCuda], capsys: Any) -> None:
    session = sessions.cuda_session(tmp_path / "g.onnx", 3, 0)
    (opened,) = cuda.opened
    assert opened.file == tmp_path / "g.onnx"
    assert opened.asked == [
        (CUDA, {"device_id": "3", "arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}),
        "CPUExecutionProvider",
    ]
    assert opened.enable_fallback == 0
    assert (opened.options.enable_mem_pattern, opened.options.log_severity_level) == (False, 4)
    assert (session._device, session._device_id) == ("cuda", 3)
    assert capsys.readouterr().out == "", "errors name missing libraries"
    sessions.cuda_session(tmp_path / "g.onnx", 0, 12345)
    assert cuda.opened[1].asked[0][1]["gpu_mem_limit"] == "12345"


def test_cuda_that_does_not_come_up_is_explained(
    tmp_path: Path, cuda: type[OnCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_session() -> None:
        sessions.cuda_session(tmp_path / "g.onnx", 0, 0)

    missing: list[str] = []

    def load(name: str, *_: object) -> None:
        if Path(name).name in missing:
            raise OSError(f"{Path(name).name}: not found")

    monkeypatch.setattr(sessions.ctypes, "CDLL", load)
    monkeypatch.setattr(cuda, "providers", ("CPUExecutionProvider",))
    with pytest.raises(StartupError, match="its driver is missing, or there is no such device"):
        open_session()
    monkeypatch.setattr(cuda, "fails", RuntimeError("no kernel"))
    with pytest.raises(RuntimeError, match="no kernel"):
        open_session()
    missing.append("libonnxruntime_providers_cuda.so")
    for fails in (RuntimeError("no kernel"), None):
        monkeypatch.setattr(cuda, "fails", fails)
        with pytest.raises(StartupError, match=r"come up: libonnxruntime_providers_cuda.so: not"):
            open_session()


def test_auto_falls_back_to_the_cpu_and_says_why(
    bundle: Bundle, cuda: type[OnCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "providers", ("CPUExecutionProvider",))
    engine = OnnxEngine(bundle, Device.AUTO)
    assert engine.device is Device.CPU
    assert engine.reason.startswith("as asked; CUDA did not come up: ")
    assert [each.names[0] for each in cuda.opened] == [CUDA]
    assert isinstance(engine._session, SpreadSession)
    with pytest.raises(StartupError, match=r"^CUDA did not come up: "):
        OnnxEngine(bundle, Device.CUDA)


def test_two_builds_of_the_runtime_are_one_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sessions.providers() == ort.get_available_providers()
    for name in ("onnxruntime", "onnxruntime_gpu"):
        folder = tmp_path / f"{name}-1.27.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.27.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(StartupError, match="both onnxruntime and onnxruntime-gpu") as caught:
        sessions.providers()
    assert f"uninstall both, then: {install_command('cpu')} (or gpu" in str(caught.value)
