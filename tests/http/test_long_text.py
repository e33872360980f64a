"""Long texts: refused, cut or divided, on every route; and what of a text was used."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from tests.support.refusals import error_of
from tests.support.serving import Server

LIMIT = 160  # tokens that the tiny models read
LONG = "the king was red . " * 40  # 200 tokens
PAIR = {"text": LONG, "next": "a moon"}
QUESTION = {"question": "who was red", "context": LONG}
SHORT = "the king was red ."


def ask(server: Server, route: str, inputs: Any, **parameters: Any) -> httpx.Response:
    body: dict[str, Any] = {"inputs": inputs}
    at_root = route in ("/embed", "/embed_all", "/embed_sparse")
    body |= parameters if at_root else {"parameters": parameters}
    return httpx.post(server.url + route, json=body, timeout=60)


INPUTS: dict[str, Any] = {
    "/embed": LONG,
    "/embed_all": LONG,
    "/embed_sparse": LONG,
    "/similarity": {"source_sentence": SHORT, "sentences": [LONG]},
    "/fill-mask": "[MASK] " + LONG,
    "/nsp": PAIR,
    "/qa": QUESTION,
    "/score": LONG,
    "/classify": LONG,
    "/token-classification": LONG,
}
WINDOWS = ("/embed", "/fill-mask", "/qa", "/score", "/classify", "/token-classification")


@pytest.mark.parametrize("route", INPUTS)
def test_every_route_refuses_cuts_and_reports(every_task: Server, route: str) -> None:
    refused = ask(every_task, route, INPUTS[route], long_text="error")
    assert error_of(refused) == (422, "text_too_long")
    cut = ask(every_task, route, INPUTS[route], long_text="truncate", return_usage=True)
    assert cut.status_code == 200, cut.text
    assert cut.headers["x-truncated"] == "1"
    usage = cut.json()["usage"]
    assert usage[-1]["tokens"] > LIMIT
    assert usage[-1]["used"] == LIMIT
    assert usage[-1]["windows"] is None
    plain = ask(every_task, route, INPUTS[route], long_text="truncate")
    assert cut.json()["result"] == plain.json()


@pytest.mark.parametrize("route", INPUTS)
def test_windows_are_for_routes_that_can_join_them(every_task: Server, route: str) -> None:
    divided = ask(every_task, route, INPUTS[route], long_text="window", return_usage=True)
    if route not in WINDOWS:
        assert error_of(divided) == (422, "invalid_body")
        return
    assert divided.status_code == 200, divided.text
    [usage] = divided.json()["usage"]
    if route in ("/embed", "/qa", "/classify", "/token-classification"):
        assert divided.headers["x-truncated"] == "0"
        assert usage["used"] == usage["tokens"]
        windows = usage["windows"]
        assert windows[0][0] == 0
        assert windows[-1][1] == len(LONG.rstrip())
        assert all(one[1] > other[0] for one, other in pairwise(windows))


@torch.no_grad()
def test_a_long_text_is_scored_token_by_token_in_its_middle(
    every_task: Server, checkpoints: dict[str, Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints["bert"])
    model = AutoModelForMaskedLM.from_pretrained(checkpoints["bert"]).eval()
    answer = ask(every_task, "/score", LONG, long_text="window").json()
    ids = tokenizer(LONG, add_special_tokens=False)["input_ids"]
    assert len(answer["tokens"]) == len(ids) == 200
    for position in (0, 79, 100, 199):
        first = min(max(position - 79, 0), 200 - 158)
        part = [tokenizer.cls_token_id, *ids[first : first + 158], tokenizer.sep_token_id]
        part[position - first + 1] = tokenizer.mask_token_id
        logits = model(torch.tensor([part])).logits[0, position - first + 1]
        expected = logits.log_softmax(0)[ids[position]].item()
        found = answer["tokens"][position]["log_probability"]
        assert found == pytest.approx(expected, abs=1e-3)
