"""Embeddings of other layers, pooled in another way, beside transformers' own hidden states."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from tests.support.serving import Server, running_server
from tests.support.tiny import save_checkpoint

TEXTS = ["the king", "a moon over the sea and the old house", "of Paris"]

LAYERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first": lambda states: states[0],
    "second-to-last": lambda states: states[-2],
    "last": lambda states: states[-1],
    "sum-last-four": lambda states: states[-4:].sum(0),
    "concat-last-four": lambda states: torch.cat(list(states[-4:]), dim=1),
    "sum-all": lambda states: states[1:].sum(0),
}
POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.amax(0),
}

TASKS = ("embed", "embed-layers", "embed-all")


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 4}
    return save_checkpoint(tmp_path_factory.mktemp("four") / "bert", "bert", **sizes)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
    four_layers: Path,
    checkpoints: dict[str, Path],
) -> Iterator[Server]:
    store = Store(tmp_path_factory.mktemp("store"))
    export(str(four_layers), "four", store, ExportOptions(tasks=TASKS))
    export(str(checkpoints["distilbert"]), "two", store, ExportOptions(tasks=TASKS))
    export(str(checkpoints["bert"]), "plain", store, ExportOptions(tasks=("embed",)))
    with running_server(store.root) as running:
        yield running


def embed(server: Server, model: str = "four", inputs: Any = TEXTS, **options: Any) -> Any:
    body = {"inputs": inputs, "model": model, "normalize": False, **options}
    return httpx.post(f"{server.url}/embed", json=body)


@torch.no_grad()
def states_of(folder: Path, text: str) -> torch.Tensor:
    """The hidden states [N, S, H] of the embeddings and of each layer."""
    encoded = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    model = AutoModel.from_pretrained(folder).eval()
    return torch.stack(model(**encoded, output_hidden_states=True).hidden_states)[:, 0]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layers", LAYERS)
def test_vectors_are_those_of_the_layers(
    server: Server, four_layers: Path, layers: str, pooling: str
) -> None:
    answer = embed(server, layers=layers, pooling=pooling)
    assert answer.status_code == 200, answer.text
    for text, vector in zip(TEXTS, answer.json(), strict=True):
        rows = LAYERS[layers](states_of(four_layers, text))
        np.testing.assert_allclose(vector, POOLINGS[pooling](rows).numpy(), atol=5e-5)
