"""Blocks as torch modules: padding, positions, sizes and names."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from cloze.export.blocks.config import EncoderConfig
from cloze.export.blocks.layer import ACTIVATIONS
from cloze.model_store import limits

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


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
        assert activation.least <= values.min() < activation.least + 0.0015, name
    assert not torch.equal(expected["gelu"], expected["gelu_new"])


SIZES: dict[str, Any] = {
    "family": "bert", "vocab_size": 1, "hidden_size": 1, "layers": 1, "heads": 1,
    "intermediate_size": 1, "max_positions": 3, "type_vocab_size": 0,
}  # fmt: skip


def test_heads_divide_the_hidden_size() -> None:
    most = limits.MAX_WIDTH
    EncoderConfig(**SIZES | {"hidden_size": most, "heads": most})
    for hidden, heads in ((1, 0), (1, most + 1), (12, 5)):
        with pytest.raises(ValidationError, match="heads"):
            EncoderConfig(**SIZES | {"hidden_size": hidden, "heads": heads})
