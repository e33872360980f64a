"""Fill-mask of whole words and of several masks together, against direct computations."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM, DistilBertForMaskedLM

from tests.support.serving import Server

WORDS = ["paris", "unhealthy", "walking", "houses", "red"]
THREE_MASKS = "a [MASK] [MASK] and a [MASK]"


def answer(server: Server, inputs: str, model: str, **parameters: Any) -> Any:
    body = {"inputs": inputs, "parameters": parameters, "model": model}
    response = httpx.post(f"{server.url}/fill-mask", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


class Oracle:
    """A checkpoint in torch, and probabilities by single runs of it."""

    def __init__(self, folder: Path, family: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        model = {"bert": BertForMaskedLM, "distilbert": DistilBertForMaskedLM}[family]
        self.model = model.from_pretrained(folder).eval()

    @torch.no_grad()
    def probabilities(self, ids: list[int], position: int) -> torch.Tensor:
        return self.model(input_ids=torch.tensor([ids])).logits[0, position].softmax(-1).double()

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)

    def masks(self, ids: list[int]) -> list[int]:
        return [i for i, token in enumerate(ids) if token == self.tokenizer.mask_token_id]

    def chain(self, ids: list[int], positions: list[int], tokens: list[int]) -> float:
        """The probability of tokens, each given those before it."""
        probability, ids = 1.0, list(ids)
        for position, token in zip(positions, tokens, strict=True):
            probability *= float(self.probabilities(ids, position)[token])
            ids[position] = token
        return probability

    def word(self, text: str, word: str) -> float:
        pieces = self.ids(word)[1:-1]
        ids = self.ids(text.replace("[MASK]", "[MASK] " * len(pieces), 1))
        return self.chain(ids, self.masks(ids)[: len(pieces)], pieces)


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def oracle(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> tuple[str, Oracle]:
    return request.param, Oracle(checkpoints[request.param], request.param)


def test_words_have_the_probability_of_all_their_tokens(
    server: Server, oracle: tuple[str, Oracle]
) -> None:
    family, torch_model = oracle
    text = "the [MASK] was red"
    words = answer(server, text, family, targets=WORDS, targets_as="words")
    expected = {word: torch_model.word(text, word) for word in WORDS}
    assert {word["token_str"]: word["score"] for word in words} == pytest.approx(expected, rel=1e-3)
    scores = [word["score"] for word in words]
    assert scores == sorted(scores, reverse=True)
    by_name = {word["token_str"]: word for word in words}
    assert len(by_name["unhealthy"]["tokens"]) > 1
    assert by_name["unhealthy"]["sequence"] == "the unhealthy was red"


@pytest.mark.parametrize("method", ["left-to-right", "beam"])
def test_the_joint_probability_is_that_of_the_chain_rule(
    server: Server, oracle: tuple[str, Oracle], method: str
) -> None:
    family, torch_model = oracle
    fillings = answer(server, THREE_MASKS, family, decode=method, top_k=4)
    ids = torch_model.ids(THREE_MASKS)
    masks = torch_model.masks(ids)
    assert len(fillings) == 4
    for filling in fillings:
        expected = torch_model.chain(ids, masks, filling["tokens"])
        assert filling["score"] == pytest.approx(expected, rel=1e-3)
        strings = [torch_model.tokenizer.decode([token]) for token in filling["tokens"]]
        assert filling["token_strs"] == strings
        assert "[MASK]" not in filling["sequence"]
    scores = [filling["score"] for filling in fillings]
    assert scores == sorted(scores, reverse=True)
