"""Verification and calibration of tiny models: which batches run, and what the formulas give."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cloze.export.check import rounding
from cloze.export.check import verify as verification
from cloze.export.check.rounding import input_scales
from cloze.export.check.verify import GraphUnderTest, verify
from cloze.export.errors import ExportError
from cloze.export.graph.session import open_session
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.model import GraphWriter, Model
from cloze.model_store.heads import Head, embedding, masked_lm
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Graph, Parity, Precision
from cloze.model_store.parity import output_errors
from tests.support.tiny_models import TOKENIZER, checkpoint, model

TWO = (masked_lm.HEAD, embedding.HEAD)


class Spy:
    """Runs a graph, records its batches, and may spoil the outputs of one of them."""

    def __init__(self, file: Path, layout: Layout, spoil: int = -1) -> None:
        self._session, self._spoil = open_session(file, layout), spoil
        self.feeds: list[dict[str, Any]] = []

    def run(self, names: Any, feeds: dict[str, Any]) -> list[Any]:
        self.feeds.append(feeds)
        outputs = self._session.run(names, feeds)
        if len(self.feeds) == self._spoil:
            outputs = [values + np.asarray(1, values.dtype) for values in outputs]
        return outputs


def under_test(
    folder: Path, precision: Precision = Precision.FP32, max_tokens: int = 20, **changes: Any
) -> tuple[GraphUnderTest, Path]:
    heads: tuple[Head, ...] = changes.pop("heads", TWO)
    made = model(**changes)
    graph: Graph = GraphWriter(made, EmbeddingRecipe(), heads, folder).write(precision)
    subject = GraphUnderTest(graph, checkpoint(made, EmbeddingRecipe()), heads, max_tokens)
    return subject, folder / graph.file


def test_the_grid_of_a_dense_graph(tmp_path: Path) -> None:
    subject, file = under_test(tmp_path)
    spy = Spy(file, Layout.DENSE)
    parity = verify(tmp_path, subject, spy)
    shapes = [feeds["input_ids"].shape for feeds in spy.feeds]
    grid = [(batch, length) for batch in (1, 2, 8) for length in (3, 16, 20)]
    assert shapes == [*grid, (2, 16), (2, 16), (2, 16)]
    masks = [len(feeds["mask_rows"]) for feeds in spy.feeds]
    embedded = [len(feeds["embed_sequences"]) for feeds in spy.feeds]
    assert masks == [3, 3, 3, 6, 6, 6, 24, 24, 24, 6, 0, 0]
    assert embedded == [1, 1, 1, 2, 2, 2, 8, 8, 8, 0, 2, 0]
    assert parity.tolerance == 1e-4
    assert parity.golden_file == "golden.json"
    for feeds in spy.feeds:
        ids, types = feeds["input_ids"], feeds["token_type_ids"]
        assert set(ids[:, 0]) == {2}
        assert set(ids[:, -1]) == {3}
        assert 0 <= ids.min() <= ids.max() < 30
        half = ids.shape[1] // 2
        assert set(types[:, : half + 1].ravel()) == {0}
        assert set(types[:, half + 1 :].ravel()) <= {1}
        assert types[:, -1].min() == 1
    assert max(int(feeds["input_ids"].max()) for feeds in spy.feeds) == 29


LOW = 1e-5
"""A tolerance that rounding exceeds in `rounding_model(0.3)`, and not in `rounding_model(0.2)`."""


def rounding_model(std: float) -> Model:
    """Return a MobileBERT without normalisation, which multiplies the errors of rounding."""
    made = model("mobilebert", layers=6)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(float(is_norm), std, generator=generator)
    return made


def verified(folder: Path, made: Model, written: Model | None = None) -> Parity:
    """Verify the graph of one model against another, or against the same one."""
    folder.mkdir(exist_ok=True)
    recipe = EmbeddingRecipe()
    graph: Graph = GraphWriter(written or made, recipe, TWO, folder).write(Precision.FP32)
    return verify(folder, GraphUnderTest(graph, checkpoint(made, recipe), TWO, 20))


def test_rounding_that_torch_shares_is_no_wrong_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error above the tolerance is accepted, and the golden outputs are compared with as much.

    The tolerance is four errors of torch's own fp32 against fp64, and one between the two. The
    usual one is lower here: how far rounding moves this model depends on the processor.
    """
    own: list[float] = []

    def measured(actual: Any, expected: Any, tolerance: float) -> dict[str, float]:
        errors = output_errors(actual, expected, tolerance)
        if tolerance == 0.0:
            own.append(max(errors[name] for name in errors if expected[name].dtype.kind == "f"))
        return errors

    monkeypatch.setitem(verification.TOLERANCES, Precision.FP32, LOW)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "output_errors", measured)
        parity = verified(tmp_path, rounding_model(0.3))
    assert parity.tolerance == pytest.approx(5 * max(own))
    assert LOW < max(parity.max_error.values()) <= parity.tolerance < 0.03
    assert verified(tmp_path / "other", rounding_model(0.2)).tolerance == LOW


def test_a_wrong_graph_is_no_rounding(tmp_path: Path) -> None:
    made, other = rounding_model(0.3), rounding_model(0.3)
    with torch.no_grad():
        other.encoder.layers[2].reduce.weight[3, 5] += 0.3  # type: ignore[operator, index, union-attr]
    with pytest.raises(ExportError, match=r"parity: .* more than 1e-04; .* differs from fp64 by"):
        verified(tmp_path, made, other)


def test_the_grid_of_a_packed_graph_has_mixed_lengths(tmp_path: Path) -> None:
    subject, file = under_test(tmp_path, Precision.FP16)
    spy = Spy(file, Layout.PACKED)
    parity = verify(tmp_path, subject, spy)
    assert (parity.tolerance, parity.golden_file) == (0.03, "golden-fp16.json")
    lengths = [np.diff(feeds["cu_seqlens"]).tolist() for feeds in spy.feeds]
    assert [len(sizes) for sizes in lengths] == [1, 1, 1, 2, 2, 2, 8, 8, 8, 2, 2, 2]
    assert [sizes[0] for sizes in lengths[:9]] == [3, 16, 20] * 3
    assert len(set(lengths[8])) > 2
    assert lengths[9:] == [[16, 16]] * 3


@pytest.mark.parametrize(
    ("call", "cell"),
    [(1, "batch 1 x 3 tokens"), (9, "batch 8 x 20 tokens"), (10, "masked_lm alone")],
)
def test_each_batch_is_compared(call: int, cell: str, tmp_path: Path) -> None:
    subject, file = under_test(tmp_path)
    with pytest.raises(ExportError, match=f"parity: .* at {cell} differs from torch by"):
        verify(tmp_path, subject, Spy(file, Layout.DENSE, spoil=call))
    assert not (tmp_path / "golden.json").exists()


def inputs_of(made: Model, linear: nn.Linear, tokens: int) -> torch.Tensor:
    """Return the inputs of a layer for the tokens of calibration."""
    seen: list[torch.Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    generator = torch.Generator().manual_seed(0)
    made(rounding._random_tokens(TOKENIZER, tokens, generator))
    hook.remove()
    return seen[0].abs().flatten(0, 1).amax(0)


@torch.no_grad()
def test_scales_follow_from_the_inputs_and_weights() -> None:
    """Xiao et al. 2023, equation 4, with alpha 0.75."""
    made = model(max_positions=24)
    scales = input_scales(made, TOKENIZER)
    assert set(scales) == {
        f"layers.{number}.{name}" for number in (0, 1) for name in ("query", "output", "up")
    }
    for number, layer in enumerate(made.encoder.layers):
        attention = layer.attention
        for name, linears in (
            ("query", (attention.query, attention.key, attention.value)),
            ("up", (layer.up,)),
        ):
            largest = inputs_of(made, linears[0], 24)
            weights = torch.cat([linear.weight.abs() for linear in linears]).amax(0)
            factors = largest**0.75 / weights**0.25
            scale = scales[f"layers.{number}.{name}"]
            torch.testing.assert_close(scale.factors, factors)
            assert scale.step == pytest.approx(float((largest / factors).max()) / 127)
        scale = scales[f"layers.{number}.output"]
        assert scale.factors is None
        largest = inputs_of(made, attention.output, 24)
        assert scale.step == pytest.approx(float(largest.max()) / 127)


@torch.no_grad()
def test_channels_without_numbers_are_not_divided_by_zero() -> None:
    made = model()
    layer = made.encoder.layers[0]
    layer.up.weight[:, 3] = 0
    layer.attention_norm.weight[5] = 0
    layer.attention_norm.bias[5] = 0
    scale = input_scales(made, TOKENIZER)["layers.0.up"]
    assert scale.factors.isfinite().all()
    largest = inputs_of(made, layer.up, 24)
    assert float(scale.factors[3]) == pytest.approx(float(largest[3]) ** 0.75 / 1e-5**0.25)
    weight = float(layer.up.weight[:, 5].abs().max())
    assert float(scale.factors[5]) == pytest.approx(1e-5**0.75 / weight**0.25)


def test_tokens_of_calibration_are_framed_and_masked_as_texts() -> None:
    ids = rounding._random_tokens(TOKENIZER, 64, torch.Generator().manual_seed(0))
    assert set(ids[:, 0].tolist()) == {TOKENIZER.special.cls}
    assert set(ids[:, -1].tolist()) == {TOKENIZER.special.sep}
    assert 0.1 < float((ids == TOKENIZER.mask_id).float().mean()) < 0.2 + 1 / TOKENIZER.size
