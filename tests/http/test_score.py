"""Scores of texts: those of a direct computation with transformers' models."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM, DistilBertForMaskedLM

from cloze.client import Client
from tests.support.serving import Server, running_server

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


def test_one_text_alone_has_the_score_it_has_in_a_list(server: Server) -> None:
    together = ask(server, TEXTS).json()
    for text, score in zip(TEXTS, together, strict=True):
        alone = ask(server, text).json()
        assert alone["score"] == pytest.approx(score["score"], abs=1e-3)
        assert [t["token"] for t in alone["tokens"]] == [t["token"] for t in score["tokens"]]


def test_the_copies_of_a_text_run_in_batches(tiny_store: Path) -> None:
    # One worker: idle workers would share the copies of a text.
    limits = {"CLOZE_WORKERS": "1", "CLOZE_MAX_BATCH_TOKENS": "620"}
    with running_server(tiny_store, **limits) as server:
        assert ask(server, "year " * 60).status_code == 200  # 60 copies of 62 tokens
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'cloze_batch_sequences_sum{model="bert",version="1"} 60.0' in metrics
        assert 'cloze_batch_sequences_count{model="bert",version="1"} 6.0' in metrics


def test_our_client_returns_scores(server: Server) -> None:
    with Client(server.url, batch_size=2) as client:
        scores = client.score(TEXTS)
    assert [score.score for score in scores] == [
        pytest.approx(item["score"], abs=1e-3) for item in ask(server, TEXTS).json()
    ]
    assert (scores[1].tokens[0].token, scores[1].tokens[0].end) == ("red", 3)


@pytest.mark.parametrize(
    ("inputs", "status", "message"),
    [
        ("", 400, "inputs is empty"),
        ([], 400, "inputs is an empty list"),
        (" \t", 422, "inputs has no token, only spaces or control characters"),
        (["red", "the [MASK]"], 422, "inputs[1] holds [MASK], which has no probability"),
        ("year " * 159, 422, "inputs has 161 tokens; the model reads 160"),
        (5, 422, "inputs: Input should be a valid string"),
    ],
)
def test_bad_input_is_refused(server: Server, inputs: Any, status: int, message: str) -> None:
    answer = ask(server, inputs)
    assert answer.status_code == status
    assert answer.json()["error"].startswith(message)


def test_the_tokens_of_all_copies_are_limited(tiny_store: Path) -> None:
    with running_server(tiny_store, CLOZE_MAX_REQUEST_TOKENS="100") as server:
        assert ask(server, ["year " * 8]).status_code == 200
        answer = ask(server, ["red", "year " * 9])
        assert answer.status_code == 422
        assert answer.json()["error"] == (
            "up to inputs[1] the masked copies hold 102 tokens; the limit of a request is 100"
        )
