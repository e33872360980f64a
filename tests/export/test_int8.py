"""int8: exact in its integers, never depends on the batch, and is refused if it loses much."""

import shutil
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from cloze.export.check.verify import pass_gate
from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder
from cloze.export.graph.linear_ops import InputScale, Int8, quantise
from cloze.export.heads import EMBEDDING, EXPORT_HEADS, SPAN
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.measure.texts import GateTexts
from cloze.export.model import Model, TorchScorer
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store, processor
from cloze.model_store.heads import HEADS
from cloze.model_store.manifest import Graph, Precision
from cloze.model_store.processor import int8_instructions, int8_settings
from cloze.service.core import Device, RequestedPrecision
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.engine.session import Session, cpu_session
from cloze.service.errors import StartupError
from tests.support.serving import running_server


def open_session(file: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    for name, value in int8_settings(int8_instructions()).items():
        options.add_session_config_entry(name, value)
    return ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 40),
    seed=st.integers(0, 99),
    fixed=st.booleans(),
    bounded=st.booleans(),
    smoothed=st.booleans(),
)
def test_a_product_is_exact_in_its_integers(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    inner: int,
    seed: int,
    fixed: bool,
    bounded: bool,
    smoothed: bool,
) -> None:
    torch.manual_seed(seed)
    linear, smooth = torch.nn.Linear(inner, 7), torch.rand(inner) + 0.5
    x = torch.randn(rows, inner) * torch.logspace(-3, 3, rows)[:, None]
    if seed % 5 == 0:
        x[0] = 0
    least = -0.171 if bounded else None
    if bounded:
        x = torch.nn.functional.gelu(x)
    g = GraphBuilder()
    scale = InputScale(0.02, smooth if smoothed else None)
    linear_ops = Int8(g, {"w": scale} if fixed else {})
    x_name = g.input("x", TensorProto.FLOAT, ["T", inner])
    entering = linear_ops.prepare_input(x_name, "w", inner, least)
    bias = g.weight("bias", linear.bias) if linear_ops.adds_bias(entering) else ""
    with torch.no_grad():
        g.output(linear_ops.matmul(entering, "w", linear, bias), "y", TensorProto.FLOAT, ["T", 7])
        head = linear_ops.row_product(x_name, "h", linear.weight, 1)
        g.output(head, "head", TensorProto.FLOAT, ["T", 7])
    folder = tmp_path_factory.mktemp("product")
    g.save(folder / "g.onnx", folder / "w.bin")
    actual, of_head = open_session(folder / "g.onnx").run(None, {"x": x.numpy()})

    factors = smooth if fixed and smoothed else torch.ones(inner)
    divided = x * factors.reciprocal()
    integers, steps = quantise((linear.weight * factors).detach())
    step = (divided.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
    if bounded:
        step = (divided.amax(1, keepdim=True) / 127).clamp_min(0.171 / 127)
    if fixed:
        step = torch.tensor(scale.step)
    rounded = (divided / step).round().clamp(-128, 127)
    expected = (rounded.double() @ integers.double().T) * steps * step
    expected += linear.bias.detach() if fixed else 0
    np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-5, atol=1e-6 if fixed else 1e-12)
    if not (fixed or bounded):
        np.testing.assert_array_equal(of_head, actual)


@settings(deadline=None)
@given(
    rows=st.integers(1, 8),
    columns=st.integers(1, 8),
    seed=st.integers(0, 99),
    scale=st.floats(1e-6, 1e6),
)
def test_weights_are_at_most_half_a_step_off(
    rows: int, columns: int, seed: int, scale: float
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    integers, steps = quantise(weight)
    assert integers.abs().max() <= 127
    assert ((integers * steps[:, None] - weight).abs() <= steps[:, None] * 0.5001).all()


@pytest.fixture(scope="module")
def tiny_int8(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Path:
    """Return a store of ``tiny``, a random DistilBERT in fp32 and int8."""
    root = tmp_path_factory.mktemp("int8")
    options = ExportOptions(tasks=("embed",), precisions=(Precision.INT8,))
    export(str(checkpoints["distilbert"]), "tiny", Store(root), options)
    return root


def test_what_the_gate_measured_is_in_the_manifest(tiny_int8: Path) -> None:
    int8 = Store(tiny_int8).open("tiny").manifest.int8
    assert int8.gate.limits.items() <= EXPORT_HEADS[EMBEDDING].limits.items()
    assert int8.gate.measured.keys() == int8.gate.limits.keys()


def test_a_checkpoint_that_loses_too_much_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """One weight of each row dwarfs the others, so that 127 steps leave these none."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(checkpoints["distilbert"], tmp_path / "spoilt"))
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "lin" in name and name.endswith("weight"):
            tensor[:, 0] = 8.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    store, options = Store(tmp_path / "store"), ExportOptions(precisions=(Precision.INT8,))
    with pytest.raises(ExportError, match=r"more than 2e-01|loses too much of this checkpoint"):
        export(str(folder), "spoilt", store, options)
    assert not store.references()


def gate_texts(checkpoint: Checkpoint, max_tokens: int) -> GateTexts:
    return GateTexts(
        checkpoint.tokenizer.tokenizer,
        type_vocab_size=checkpoint.model.config.type_vocab_size,
        mask_id=checkpoint.tokenizer.mask_id,
        max_tokens=max_tokens,
    )


def test_texts_are_cut_to_what_the_model_reads(checkpoints: dict[str, Path]) -> None:
    """The gate's own texts are longer than a tiny model may allow, and one token type is all that
    it may have.
    """
    checkpoint = load_checkpoint(str(checkpoints["bert-qa"]))
    short = replace(checkpoint.model.config, max_positions=12, type_vocab_size=1)
    checkpoint = replace(checkpoint, model=Model(short, [SPAN]).eval())
    scorer = TorchScorer(checkpoint.model, torch.device("cpu"))
    gate = pass_gate(scorer, scorer, "same", [HEADS[SPAN]], gate_texts(checkpoint, 12))
    assert gate.measured == {"qa_span_agreement": 1.0}


@pytest.mark.parametrize(
    ("asked", "flags", "expected"),
    [
        ("auto", "sse avx512_vnni", "int8: since the processor has avx512_vnni and the bundle's"),
        ("auto", "sse avx2", "int8: since the processor has avx2 and the bundle's gate"),
        ("auto", "avx2 avx512f", "fp32: since the processor has none of asimddp, avx512_vnni"),
        (Precision.INT8, "avx2", "int8: as asked"),
        (Precision.INT8, "sse", "int8: as asked, though the processor has none of"),
        (Precision.FP32, "avx512_vnni", "fp32: as asked"),
    ],
)
def test_the_engine_says_what_it_chose_and_why(
    asked: RequestedPrecision,
    flags: str,
    expected: str,
    tiny_int8: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nmodel name\t: avx_vnni in a name\nflags\t\t: {flags}\n"
    )
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    engine = OnnxEngine(Store(tiny_int8).open("tiny"), Device.CPU, asked)
    found = f"{engine.precision}: {engine.reason}"
    assert found.startswith(expected)
    assert ("though" in found) == ("though" in expected)


def test_an_older_int8_graph_that_does_not_load_gives_way_to_fp32(
    tiny_int8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two products of older graphs read one weight, which onnxruntime's rewrite cannot replace."""

    def open_session(bundle: Bundle, graph: Graph) -> Session:
        if graph.precision is Precision.INT8:
            raise RuntimeError("Attempt to replace the existing tensor")
        return cpu_session(bundle.file(graph.file))

    def engine(flags: str, asked: RequestedPrecision) -> OnnxEngine:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        bundle = Store(tiny_int8).open("tiny")
        return OnnxEngine(bundle, Device.CPU, asked, open_session=open_session)

    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    chosen = engine("avx2", "auto")
    reason = "since its graph does not load: Attempt to replace the existing tensor; export the"
    assert (chosen.precision, chosen.reason[: len(reason)]) == (Precision.FP32, reason)
    with pytest.raises(StartupError, match="export the model again if an older version"):
        engine("avx2", Precision.INT8)
    with pytest.raises(StartupError, match=r"its graph does not load: Attempt .* tensor$"):
        engine("avx512_vnni", "auto")


def test_the_server_logs_its_choice_and_long_neighbours_move_no_vector(tiny_int8: Path) -> None:
    def embedded(*texts: str) -> np.ndarray:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": texts})
        return np.array(answer.json(), np.float32)

    with running_server(tiny_int8, "--precision", "int8") as server:
        short, long = "A cat sat on the mat.", "Networks, 7 % and ROME! " * 6
        alone = embedded(short)[0]
        beside = embedded(*[long] * 7, short, *[f"A dog {n} on the mat." for n in range(8)])[7]
        np.testing.assert_allclose(beside, alone, atol=1e-5)
        assert np.linalg.norm(alone - embedded("A cat sat on the hat.")[0]) > 0.01
        chosen = "serving tiny@1 for embed on cpu in int8, as asked"
        assert any(chosen in line for line in server.log)
        assert httpx.get(f"{server.url}/info").json()["model_dtype"] == "int8"
