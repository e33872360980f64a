"""What the server answers over REST equals what transformers answers, for every task and parameter."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForNextSentencePrediction,
    DistilBertForMaskedLM,
    FillMaskPipeline,
    PreTrainedTokenizerBase,
)

from tests.support.faulty import assert_close
from tests.support.serving import Server

QA_GOLDEN = json.loads((Path(__file__).parents[1] / "oracles" / "qa-v4.json").read_text())

TEXTS = [
    "Paris is the [MASK] of France.",
    "[MASK]!",
    "the [MASK] opened the [MASK] of the old house, and [MASK] saw the moon",
    "who isn't [MASK] ? walked , running .",
    "Ünïcödé [MASK] 北京 zzz",
]


def post(server: Server, route: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{route}", json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


def tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=["bert", "distilbert"])
def fill_mask_pipeline(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path]
) -> tuple[str, FillMaskPipeline]:
    cls = {"bert": BertForMaskedLM, "distilbert": DistilBertForMaskedLM}[request.param]
    folder = checkpoints[request.param]
    return request.param, FillMaskPipeline(
        model=cls.from_pretrained(folder), tokenizer=tokenizer_of(folder), device="cpu"
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"top_k": 1},
        {"top_k": 20},
        {"targets": ["paris", "king", "of"]},
        {"targets": ["moon"], "top_k": 3},
    ],
)
def test_fill_mask(
    server: Server,
    fill_mask_pipeline: tuple[str, FillMaskPipeline],
    text: str,
    parameters: dict[str, Any],
) -> None:
    name, pipeline = fill_mask_pipeline
    expected = pipeline(text, **parameters)
    assert_close(
        post(server, "/fill-mask", inputs=text, parameters=parameters, model=name), expected
    )


def test_nsp(server: Server, checkpoints: dict[str, Path]) -> None:
    tokenizer = tokenizer_of(checkpoints["bert"])
    model = BertForNextSentencePrediction.from_pretrained(checkpoints["bert"])
    pairs = [
        ("the king opened the door", "and saw the river"),
        ("a", "b"),
        ("who? " * 60, "moon " * 60),
    ]
    expected = []
    for first, second in pairs:
        with torch.no_grad():
            inputs = tokenizer(
                first, second, truncation="longest_first", max_length=160, return_tensors="pt"
            )
            is_next, not_next = model(**inputs).logits[0].softmax(0).tolist()
        expected.append(
            [{"label": "IsNext", "score": is_next}, {"label": "NotNext", "score": not_next}]
        )
    bodies = [{"text": first, "next": second} for first, second in pairs]
    assert_close(post(server, "/nsp", inputs=bodies), expected)
    assert_close(post(server, "/nsp", inputs=bodies[0]), expected[0])
    scores = [result[0]["score"] for result in expected]
    assert len({round(score, 3) for score in scores}) == 3, "the oracle must tell the pairs apart"


@pytest.mark.parametrize(
    "case", QA_GOLDEN["cases"], ids=lambda case: f"{case['question'][:12]}-{case['parameters']}"
)
def test_qa_as_transformers_4_answers(server: Server, case: dict[str, Any]) -> None:
    """But for two things: spans that end before they begin, which it gives with a score of 0 when
    it runs out of others; and an answer of several windows, for which it adds their scores.
    """
    inputs = {"question": case["question"], "context": case["context"]}
    expected = case["answers"] if isinstance(case["answers"], list) else [case["answers"]]
    expected = [answer for answer in expected if answer["score"] > 0]
    asked = case["parameters"] | {"return_usage": True}
    answer = post(server, "/qa", inputs=[inputs], parameters=asked)
    [answers], windows = answer["result"], len(answer["usage"][0]["windows"] or [None])
    answers = answers if isinstance(answers, list) else [answers]
    if windows == 1:
        assert_close(answers, expected)
        return
    ours = {answer["answer"].lower(): answer["score"] for answer in answers}
    theirs = {answer["answer"].lower(): answer["score"] for answer in expected}
    assert ours.keys() & theirs.keys() or len(answers) == 1
    for text in ours.keys() & theirs.keys():
        assert ours[text] - 1e-4 <= theirs[text] <= windows * ours[text] + 1e-4
