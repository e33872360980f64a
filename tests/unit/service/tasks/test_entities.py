"""Entities of texts whose vocabulary marks the tokens that begin a word."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from cloze.model_store import Bundle
from cloze.model_store.heads import ArrayResult
from cloze.service.tasks.task import TaskContext
from cloze.service.text.tokenizer import Tokenizer
from tests.support.task_model import LIMITS, decoded, manifest, prepared

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += ["\u2581the", "\u2581red", "s", "\u2581door", "-", "a", "\u2581a"]

# The labels are O, B-PER, I-PER and LOC.
OUT, BEGIN, IN, LOC = np.eye(4, dtype=np.float32) * 9


@pytest.fixture(params=["with the space", "without the space"])
def marked(request: pytest.FixtureRequest, tmp_path: Path) -> TaskContext:
    """Return a model whose tokens may include the space before a word, or not."""
    backend = Backend(models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=1))
    marks = pre_tokenizers.Metaspace(prepend_scheme="always")
    alone = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    backend.pre_tokenizer = marks if request.param == "with the space" else alone
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    size = {"vocab_size": len(PIECES)}
    base = manifest()
    special = {"cls_id": 2, "sep_id": 3, "mask_id": 4}
    described = manifest(
        tokenizer=base.tokenizer.model_dump(exclude_none=True) | size | special,
        architecture=base.architecture.model_dump() | size,
    )
    return TaskContext(described, Tokenizer(Bundle(described, tmp_path)), LIMITS)


def groups(
    text: str, rows: list[Any], model: TaskContext, strategy: str, **parameters: Any
) -> list[tuple[str, str, int]]:
    parameters["aggregation_strategy"] = strategy
    request = prepared("token-classification", text, model, **parameters)
    [encoding] = request.encodings
    assert len(encoding) == len(rows) + 2
    result = ArrayResult(np.stack([OUT, *rows, OUT]))
    [entities] = decoded("token-classification", request, [{"token_classification": result}], model)
    return [(e.entity_group, e.word, e.end) for e in entities]


def test_a_token_without_a_space_before_it_continues_a_word(marked: TaskContext) -> None:
    for text, rows, strategy, expected in (
        ("reds door", [BEGIN, LOC, LOC], "first", [("PER", "reds", 4), ("LOC", "door", 9)]),
        ("reds door", [BEGIN, LOC, LOC], "simple", [("PER", "red", 3), ("LOC", "s door", 9)]),
        ("the door", [LOC, BEGIN], "first", [("LOC", "the", 3), ("PER", "door", 8)]),
    ):
        assert groups(text, rows, marked, strategy) == expected, text
        assert groups(text, rows, marked, strategy, words="tokenizer") == expected, text
    text, rows = "red\N{SNOWMAN}", [BEGIN, LOC]
    apart = groups(text, rows, marked, "first")
    assert apart == [("PER", "red", 3), ("LOC", "\N{SNOWMAN}", 4)], "an unknown token is a word"
    whole = groups(text, rows, marked, "first", words="tokenizer")
    assert whole == [("PER", "red\N{SNOWMAN}", 4)]
    apart = groups("red \N{SNOWMAN}", [BEGIN, LOC], marked, "first")
    assert [end for _, _, end in apart] == [3, 5]
