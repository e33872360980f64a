"""Blocks as torch modules: padding, positions, sizes and names."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.encoder import Embeddings, Encoder, post_norm_encoder
from cloze.export.blocks.layer import ACTIVATIONS, InputKind, Layer
from cloze.export.blocks.rotary import Rotary
from cloze.export.check.rounding import input_scales
from cloze.model_store import limits
from tests.unit.export.graph.tiny_models import TOKENIZER, config, model

pytestmark = pytest.mark.usefixtures("without_gradients")

IDS = torch.arange(5, 20).reshape(3, 5)


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- embeddings and encoder --------------------------------------------------------------------


def test_padding_changes_no_real_token() -> None:
    made = model()
    lengths = torch.tensor([5, 2, 1])
    mask = torch.arange(5) < lengths[:, None]
    types = (torch.arange(5) > 1).long().expand(3, 5)
    padded = made(IDS, types, mask)
    for row, length in enumerate(lengths.tolist()):
        alone = made(IDS[row : row + 1, :length], types[row : row + 1, :length])
        torch.testing.assert_close(padded[row, :length], alone[0], atol=1e-6, rtol=0)
    assert not torch.allclose(made(IDS, types)[1, 0], padded[1, 0], atol=1e-3)


def test_tokens_have_their_positions_and_types() -> None:
    made = model().encoder.embeddings
    assert made.token_type is not None
    types = torch.tensor([[0, 1, 0, 1, 1]] * 3)
    x = made(IDS, types)
    for row in range(3):
        for token in range(5):
            total = (
                made.word.weight[IDS[row, token]]
                + made.position.weight[token]
                + made.token_type.weight[types[row, token]]
            )
            expected = F.layer_norm(total, (16,), made.norm.weight, made.norm.bias, 1e-3)
            torch.testing.assert_close(x[row, token], expected)
    zeros = torch.zeros_like(IDS)
    torch.testing.assert_close(made(IDS, None), made(IDS, zeros))


def test_a_family_without_token_types_ignores_them() -> None:
    made = model("distilbert")
    assert made.encoder.embeddings.token_type is None
    torch.testing.assert_close(made(IDS, torch.ones_like(IDS)), made(IDS))
    assert len(made.encoder.embeddings.tables()) == 2
    assert len(model().encoder.embeddings.tables()) == 3


def test_tables_have_the_sizes_of_the_configuration() -> None:
    made = Embeddings(config())
    tables = [tuple(table.weight.shape) for table in made.tables().values()]
    assert tables == [(30, 16), (24, 16), (2, 16)]
    assert made.norm.eps == 1e-3


def test_states_are_the_embeddings_and_the_output_of_each_layer() -> None:
    encoder = model().encoder
    types = torch.ones_like(IDS)
    states = encoder.states(IDS, types)
    assert [tuple(one.shape) for one in states] == [(3, 5, 16)] * 3
    torch.testing.assert_close(states[0], encoder.embeddings(IDS, types))
    torch.testing.assert_close(states[1], encoder.layers[0](states[0], None))
    torch.testing.assert_close(states[2], encoder(IDS, types))


def test_a_layer_that_stands_twice_has_one_name() -> None:
    one, other = Layer(config()), Layer(config())
    encoder = Encoder(Embeddings(config()), [one, other, one])
    assert [name for name, _ in encoder.named_layers()] == ["layers.0", "layers.1", "layers.0"]
    assert [layer for _, layer in encoder.named_layers()] == [one, other, one]
    assert list(encoder.products()) == [
        f"layers.{number}.{part}" for number in (0, 1) for part in ("query", "output", "up", "down")
    ]
    x = encoder(IDS)
    expected = one(other(one(encoder.embeddings(IDS, None), None), None), None)
    torch.testing.assert_close(x, expected)


def test_products_have_their_layers_and_the_kind_of_their_input() -> None:
    layer = Layer(config())
    attention = layer.attention
    assert {name: (group.linears, group.input) for name, group in layer.products().items()} == {
        "query": ((attention.query, attention.key, attention.value), InputKind.NORM),
        "output": ((attention.output,), InputKind.ATTENTION),
        "up": ((layer.up,), InputKind.NORM),
        "down": ((layer.down,), InputKind.ACTIVATION),
    }
    assert len(set(InputKind)) == 3


def test_narrow_embeddings_have_a_product_of_their_own() -> None:
    """Its name is the one under which the graph looks for a scale."""
    made = model("electra")
    names = list(made.encoder.products())
    assert names[0] == "embeddings.projection"
    assert names[1].startswith("layers.0.")
    assert next(iter(model().encoder.products())).startswith("layers.0.")
    assert "embeddings.projection" in input_scales(made, TOKENIZER)


def test_sizes_of_a_layer() -> None:
    layer = Layer(config())
    assert tuple(layer.up.weight.shape) == (24, 16)
    assert tuple(layer.down.weight.shape) == (16, 24)
    assert layer.attention_norm.eps == layer.output_norm.eps == 1e-3
    assert len(post_norm_encoder(config(layers=3)).layers) == 3


# ---- a layer by its formula --------------------------------------------------------------------


def attention_by_hand(layer: Layer, x: Tensor) -> Tensor:
    """Return the attention of one sequence [S, H], head by head."""
    parts = []
    attention = layer.attention
    query, key, value = attention.query(x), attention.key(x), attention.value(x)
    for head in range(2):
        own = slice(8 * head, 8 * head + 8)
        weights = (query[:, own] @ key[:, own].T / 8**0.5).softmax(1)
        parts.append(weights @ value[:, own])
    return attention.output(torch.cat(parts, 1))


def test_a_layer_is_attention_and_a_network_with_norms_behind() -> None:
    layer = model().encoder.layers[0]
    x = drawn(4, 16)
    middle = layer.attention_norm(x + attention_by_hand(layer, x))
    expected = layer.output_norm(middle + layer.down(F.gelu(layer.up(middle))))
    torch.testing.assert_close(layer(x[None], None)[0], expected, atol=1e-6, rtol=1e-5)


# ---- activations -------------------------------------------------------------------------------


def test_activations_are_those_of_their_names() -> None:
    x = torch.linspace(-6, 6, 400_001)
    expected = {
        "gelu": F.gelu(x),
        "gelu_new": F.gelu(x, approximate="tanh"),
        "gelu_pytorch_tanh": F.gelu(x, approximate="tanh"),
        "relu": F.relu(x),
        "silu": F.silu(x),
        "tanh": torch.tanh(x),
    }
    assert ACTIVATIONS.keys() == expected.keys()
    for name, activation in ACTIVATIONS.items():
        values = activation.forward(x)
        torch.testing.assert_close(values, expected[name])
        assert activation.least is not None
        assert activation.least <= values.min() < activation.least + 0.0015, name
    assert not torch.equal(expected["gelu"], expected["gelu_new"])


# ---- rotary positions and gates ------------------------------------------------------------------


def test_numbers_are_turned_in_pairs_by_angles_that_grow_with_the_position() -> None:
    rotary, x = Rotary(4, 6, 100.0), drawn(2, 3, 6, 4)
    turned = rotary(x)
    torch.testing.assert_close(turned[:, :, 0], x[:, :, 0])
    for position, pair in product(range(6), range(2)):
        angle = position * 100.0 ** (-2 * pair / 4)
        one, other = x[:, :, position, pair], x[:, :, position, pair + 2]
        expected = one * math.cos(angle) - other * math.sin(angle)
        torch.testing.assert_close(turned[:, :, position, pair], expected)


def test_a_factor_slows_the_slowest_pair_by_itself() -> None:
    plain, scaled = Rotary(8, 5, 100.0), Rotary(8, 5, 100.0, factor=4.0)
    angles = [table.sin[1].asin() for table in (plain, scaled)]
    expected = [(100.0 * 4) ** (-2 * k / 8) / 4 ** (2 / 8) for k in range(4)]
    torch.testing.assert_close(angles[1], torch.tensor(expected))
    torch.testing.assert_close(angles[0][3] / angles[1][3], torch.tensor(4.0))
    assert plain.name != scaled.name != Rotary(8, 5, 50.0, factor=4.0).name


def test_positions_beyond_the_tables_are_an_error() -> None:
    rotary = Rotary(4, 6, 100.0)
    rotary(drawn(1, 1, 6, 4))
    with pytest.raises(IndexError, match="7 tokens are more than the 6 rotary positions"):
        rotary(drawn(1, 1, 7, 4))
    with pytest.raises(ValueError, match="even number per head, got 5"):
        Rotary(5, 6, 100.0)


def test_the_gate_is_the_activated_half() -> None:
    layer = Layer(config(gated=True, activation="silu"))
    x = drawn(2, 16)
    assert layer.gate is not None
    inner = F.silu(layer.gate(x)) * layer.up(x)
    torch.testing.assert_close(layer._feed_forward(x), layer.down(inner))
    assert layer.products()["up"].linears == (layer.up, layer.gate)


# ---- sizes -------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "family": "bert", "vocab_size": 1, "hidden_size": 1, "layers": 1, "heads": 1,
    "intermediate_size": 1, "max_positions": 3, "type_vocab_size": 0,
}  # fmt: skip


def test_defaults_of_the_sizes() -> None:
    sizes = EncoderConfig(**SIZES)
    assert (sizes.activation, sizes.layer_norm_eps) == ("gelu", 1e-12)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("vocab_size", 1, limits.MAX_VOCABULARY),
        ("hidden_size", 1, limits.MAX_WIDTH),
        ("layers", 1, limits.MAX_LAYERS),
        ("intermediate_size", 1, limits.MAX_WIDTH),
        ("max_positions", 3, limits.MAX_POSITIONS),
        ("type_vocab_size", 0, limits.MAX_WIDTH),
    ],
)
def test_limits_of_the_sizes(name: str, least: int, most: int) -> None:
    for value in (least, most):
        assert getattr(EncoderConfig(**SIZES | {name: value}), name) == value
    for value in (least - 1, most + 1):
        with pytest.raises(ValidationError, match=name):
            EncoderConfig(**SIZES | {name: value})


def test_heads_divide_the_hidden_size() -> None:
    EncoderConfig(**SIZES | {"hidden_size": limits.MAX_WIDTH, "heads": limits.MAX_WIDTH})
    with pytest.raises(ValidationError, match="heads"):
        EncoderConfig(**SIZES | {"heads": 0})
    with pytest.raises(ValidationError, match="heads"):
        EncoderConfig(**SIZES | {"heads": limits.MAX_WIDTH + 1})
    with pytest.raises(ValidationError, match="size 12 is not a multiple of the 5 attention heads"):
        EncoderConfig(**SIZES | {"hidden_size": 12, "heads": 5})


def test_limits_of_the_epsilon() -> None:
    for value in (1e-12, 0.9):
        EncoderConfig(**SIZES | {"layer_norm_eps": value})
    for value in (0, 1):
        with pytest.raises(ValidationError, match="layer_norm_eps"):
            EncoderConfig(**SIZES | {"layer_norm_eps": value})
