"""Entities of labels that mark their ends: BIOES, BILOU and their kin, and labels that do not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.token_classification import as_iob2, tag_scheme
from cloze.service.tasks.task import TaskContext
from tests.support.route_service import Service
from tests.support.task_model import context, decoded, prepared

BIOES = ("O", "B-PER", "I-PER", "E-PER", "S-PER", "B-LOC", "I-LOC", "E-LOC", "S-LOC")
BILOU = tuple(label.replace("E-", "L-").replace("S-", "U-") for label in BIOES)
BMES = tuple(label.replace("I-", "M-") for label in BIOES)
BMEWO = tuple(label.replace("S-", "W-") for label in BMES)
BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")

CASES = {
    "O S-PER S-PER O": ["PER b", "PER c"],
    "B-PER E-PER B-PER E-PER": ["PER a b", "PER c d"],
    "B-PER I-PER I-PER E-PER": ["PER a b c d"],
    "B-PER E-PER S-PER S-LOC": ["PER a b", "PER c", "LOC d"],
    "S-PER B-PER E-PER O": ["PER a", "PER b c"],
    "B-LOC E-LOC I-LOC E-LOC": ["LOC a b", "LOC c d"],
    # What fits nothing before it begins an entity.
    "O E-PER E-PER O": ["PER b", "PER c"],
    "I-PER E-PER O I-PER": ["PER a b", "PER d"],
    "B-PER E-LOC E-PER O": ["PER a", "LOC b", "PER c"],
    "S-PER I-PER E-PER O": ["PER a", "PER b c"],
    "B-PER O E-PER O": ["PER a", "PER c"],
    "B-PER S-PER I-PER O": ["PER a", "PER b", "PER c"],
    "B-PER B-PER I-PER I-PER": ["PER a", "PER b c d"],
}
"""The labels of "a b c d" -> its entities."""


def model(labels: tuple[str, ...]) -> TaskContext:
    return context(
        tasks=["token-classification"],
        embedding=None,
        heads={"token_classification": {"labels": labels}},
    )


def outputs(labels: tuple[str, ...], tags: str) -> list[dict[str, Any]]:
    rows = [labels.index(tag) for tag in ["O", *tags.split(), "O"]]
    logits = np.eye(len(labels), dtype=np.float32)[rows] * 9
    return [{"token_classification": ArrayResult(logits)}]


def entities(labels: tuple[str, ...], tags: str, **parameters: Any) -> Any:
    served = model(labels)
    request = prepared("token-classification", "a b c d", served, **parameters)
    [found] = decoded("token-classification", request, outputs(labels, tags), served)
    return found


@pytest.mark.parametrize("strategy", ["simple", "first", "average", "max"])
@pytest.mark.parametrize("tags", CASES)
def test_tags_that_mark_ends_are_joined(tags: str, strategy: str) -> None:
    for labels in (BIOES, BILOU, BMES, BMEWO):
        renamed = dict(zip(BIOES, labels, strict=True))
        written = " ".join(renamed[tag] for tag in tags.split())
        found = entities(labels, written, aggregation_strategy=strategy)
        assert [f"{each.entity_group} {each.word}" for each in found] == CASES[tags]
        assert all("a b c d"[each.start : each.end] == each.word for each in found)


@pytest.mark.parametrize(
    ("labels", "scheme"),
    [
        (BIOES, "BIOES"),
        (BILOU, "BILOU"),
        (BMES, "BMES"),
        (BMEWO, "BMEWO"),
        (("O", "B-PER", "I-PER", "E-PER"), "BIOES"),
        (("[PAD]", "X", *BIOES), "BIOES"),
        (BIO, None),
        (("O", "I-PER", "I-LOC"), None),
        (("O", "B-PER", "I-PER", "E-MAIL", "S-BAHN"), None),
        (("O", "E-MAIL", "S-BAHN", "U-BAHN"), None),
        (("O", "B-PER", "E-PER", "U-PER"), None),
        (("LABEL_0", "LABEL_1"), None),
    ],
)
def test_a_scheme_is_found_in_the_labels(labels: tuple[str, ...], scheme: str | None) -> None:
    assert tag_scheme(labels) == scheme
    assert (as_iob2(labels, labels) == labels) == (scheme is None)


def test_info_names_the_scheme(tmp_path: Path) -> None:
    heads = {"token_classification": {"labels": BILOU}}
    described = {"tasks": ("token-classification",), "embedding": None, "heads": heads}
    with Service(tmp_path, [described, {"name": "other"}]) as service:
        ends, other = service.get("/info").json()["models"]
    assert ends["tag_scheme"] == "BILOU"
    assert "tag_scheme" not in other
