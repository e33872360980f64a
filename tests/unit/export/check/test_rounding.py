"""Rounding of weights: which matrices become fp16 or integers, and what is refused."""

import copy
import pickle

import pytest
import torch

from cloze.export.check.rounding import input_scales, round_weights
from cloze.export.errors import ExportError
from cloze.export.graph.linear_ops import quantise
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.model import Model
from cloze.model_store.manifest import Weights
from tests.support.tiny_models import TOKENIZER, model, projected


def changed(before: Model, after: Model) -> dict[str, torch.Tensor]:
    """Return the parameters that differ, as they were."""
    others = dict(after.named_parameters())
    return {
        name: parameter
        for name, parameter in before.named_parameters()
        if not torch.equal(parameter, others[name])
    }


def test_fp16_rounds_every_matrix_and_no_vector() -> None:
    made, recipe = model(), projected()
    before, projection = copy.deepcopy(made), recipe.steps[0].linear.weight.clone()
    round_weights(made, recipe, Weights.FP16, {})
    after = dict(made.named_parameters())
    differing = changed(before, made)
    assert set(differing) == {name for name, p in before.named_parameters() if p.ndim > 1}
    for name, parameter in differing.items():
        assert torch.equal(after[name], parameter.half().float())
    assert torch.equal(recipe.steps[0].linear.weight, projection.half().float())


@torch.no_grad()
def test_int8_rounds_the_encoder_to_integers_and_the_heads_to_fp16() -> None:
    made = model()
    scales = input_scales(made, TOKENIZER)
    before = copy.deepcopy(made)
    round_weights(made, EmbeddingRecipe(), Weights.INT8, scales)
    for number, (layer, old) in enumerate(
        zip(made.encoder.layers, before.encoder.layers, strict=True)
    ):
        for name, factors in (("up", scales[f"layers.{number}.up"].factors), ("down", None)):
            weight = getattr(old, name).weight
            smoothed = weight if factors is None else weight * factors
            integers, steps = quantise(smoothed)
            expected = integers * steps[:, None]
            expected = expected if factors is None else expected / factors
            torch.testing.assert_close(getattr(layer, name).weight, expected)
        value = old.attention.value.weight * scales[f"layers.{number}.query"].factors
        integers, steps = quantise(value)
        expected = integers * steps[:, None] / scales[f"layers.{number}.query"].factors
        torch.testing.assert_close(layer.attention.value.weight, expected)
    words, old_words = made.encoder.embeddings.word.weight, before.encoder.embeddings.word.weight
    integers, steps = quantise(old_words)
    torch.testing.assert_close(words, integers * steps[:, None])
    positions = before.encoder.embeddings.position.weight
    assert torch.equal(made.encoder.embeddings.position.weight, positions.half().float())
    classifier = before.span.classifier
    assert torch.equal(made.span.classifier.weight, classifier.weight.half().float())
    assert torch.equal(made.span.classifier.bias, classifier.bias)


def test_weights_that_fp16_cannot_hold_are_named() -> None:
    made = model()
    with torch.no_grad():
        made.encoder.layers[1].up.weight[0, 0] = -65600
    with pytest.raises(
        ExportError, match=r"encoder.layers.1.up.weight holds 6.56e\+04, .* use fp32"
    ):
        round_weights(made, EmbeddingRecipe(), Weights.FP16, {})


def test_calibration_leaves_no_hook_in_the_model() -> None:
    made = model()
    input_scales(made, TOKENIZER)
    assert pickle.dumps(made.encoder), "a local function, as a hook is one, cannot be pickled"
