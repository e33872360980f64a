"""Scores of texts: those of a direct computation with transformers' models."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM, DistilBertForMaskedLM

from tests.support.serving import Server

TEXTS = [
    "paris is the capital of france",
    "red",
    "Ünknöwn houses 한국, walking doors!",
    "year " * 60,
]


def ask(server: Server, inputs: Any, model: str = "bert") -> httpx.Response:
    return httpx.post(f"{server.url}/score", json={"inputs": inputs, "model": model}, timeout=60)


@torch.no_grad()
def log_probabilities(folder: Path, family: str, text: str) -> list[tuple[tuple[int, int], float]]:
    """Mask each token in turn; return the log-probability of each, by its characters."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = {"bert": BertForMaskedLM, "distilbert": DistilBertForMaskedLM}[family]
    model = model.from_pretrained(folder).eval()
    encoded = tokenizer(text, return_offsets_mapping=True, return_tensors="pt")
    ids, scored = encoded.input_ids[0], []
    for position in range(1, len(ids) - 1):
        masked = ids.clone()
        masked[position] = tokenizer.mask_token_id
        logits = model(input_ids=masked[None]).logits[0, position]
        start, end = encoded.offset_mapping[0, position].tolist()
        scored.append(((start, end), float(logits.log_softmax(-1)[ids[position]])))
    return scored


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_scores_are_those_of_a_direct_computation(
    server: Server, checkpoints: dict[str, Path], family: str
) -> None:
    answer = ask(server, TEXTS, family)
    assert answer.status_code == 200, answer.text
    for text, score in zip(TEXTS, answer.json(), strict=True):
        expected = log_probabilities(checkpoints[family], family, text)
        places = [(token["start"], token["end"]) for token in score["tokens"]]
        assert places == [place for place, _ in expected]
        values = [token["log_probability"] for token in score["tokens"]]
        assert values == pytest.approx([value for _, value in expected], abs=1e-4)
        assert score["score"] == pytest.approx(sum(value for _, value in expected), abs=1e-3)
