"""A bundle's threshold of "no answer": what the export writes, the server and `evaluate` use."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from starlette.testclient import TestClient

from cloze.cli import cli
from cloze.export.measure.evaluate import EvaluationData, evaluate, open_subject
from cloze.model_store import Store
from cloze.service.service import single_process
from cloze.service.settings import load_settings

QUESTION, CONTEXT = "who walked to the house ?", "king of paris walked to old house"


def exported(source: Path, store: Path, *options: str) -> str:
    """Return the last line of an export."""
    arguments = ["export", str(source), "--name", "qa", "--model-store", str(store), *options]
    return CliRunner().invoke(cli, arguments).output.strip().splitlines()[-1]


def measured(source: str, store: Path, *answers: str) -> dict[str, float]:
    """Return the figures of one question per answer; the answer "" is that there is none."""
    qas = [
        {
            "id": str(number),
            "question": QUESTION,
            "answers": [{"text": answer, "answer_start": CONTEXT.index(answer)}] if answer else [],
        }
        for number, answer in enumerate(answers)
    ]
    file = store / "questions.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]}))
    subject = open_subject(source, Store(store), torch.device("cpu"))
    return evaluate(subject, EvaluationData([], [], [file], 1.0), store, lambda _: None)


def served(store: Path) -> list[str]:
    """Return the answers of a server of the store where "" is a candidate, and where it is none."""
    inputs = {"question": QUESTION, "context": CONTEXT}
    service = single_process(load_settings({"model_store": store, "device": "cpu"}))
    answers = []
    with TestClient(service, base_url="http://localhost") as client:
        for impossible in (True, False):
            asked = {"handle_impossible_answer": impossible, "align_to_words": False}
            body = {"inputs": inputs, "parameters": asked}
            answers.append(client.post("/qa", json=body).json()["answer"])
    return answers


@pytest.mark.slow
def test_the_threshold_that_evaluate_prints_is_where_answers_become_empty(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    source = checkpoints["bert-qa"]
    # Without an answer, the best threshold is one below the only margin.
    margin = measured(str(source), tmp_path, "")["qa_best_threshold"] + 1
    for threshold, is_empty in ((margin - 0.1, True), (margin + 0.1, False), (0.0, margin > 0)):
        exported(source, tmp_path, "--no-answer-threshold", str(threshold))
        answer, span = served(tmp_path)
        assert span
        assert answer == ("" if is_empty else span)
        figures = measured("bundle:qa", tmp_path, "", "king")
        assert figures["qa_unanswerable_f1"] == 100 * is_empty
        assert figures["qa_best_threshold"] == pytest.approx(margin, abs=1 + 1e-3)


def test_a_threshold_is_part_of_the_bundle(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = checkpoints["bert-qa"]

    def version(*options: str) -> int:
        exported(source, tmp_path, *options)
        return Store(tmp_path).manifest("qa").version

    assert [version(), version(), version("--no-answer-threshold", "-2.5")] == [1, 1, 2]
    assert version() == 3, "a server serves the newest version, and an equal one was version 1"
    (tmp_path / "qa/3/weights.bin").write_bytes(b"damaged")
    assert version() == 4
    manifest = json.loads((tmp_path / "qa/2/manifest.json").read_text())
    assert manifest["heads"] == {"span": {"no_answer_threshold": -2.5}}
    assert "heads" not in json.loads((tmp_path / "qa/1/manifest.json").read_text())


@pytest.mark.parametrize(
    ("kind", "threshold", "message"),
    [
        ("bert-qa", "nan", "must be within 1000 logits of 0"),
        ("bert-qa", "-1001", "must be within 1000 logits of 0"),
        ("bert", "1", "is for the task qa, which this export has not"),
    ],
)
def test_a_threshold_that_no_bundle_can_have_is_refused(
    kind: str, threshold: str, message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    said = exported(checkpoints[kind], tmp_path, "--no-answer-threshold", threshold)
    assert message in said
    assert not Store(tmp_path).references()
