"""Preparing a request needs memory in proportion to its bytes, with one token per character too."""

import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from cloze.model_store import Bundle
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.task import TaskContext
from cloze.service.text.tokenizer import Tokenizer
from tests.support.refusals import refused
from tests.support.task_model import limited, manifest, prepared

MB = 1_000_000
MOST_MB, MOST_PER_BYTE = 6, 16
"""The limit of ``docs/security.md`` per byte; a piece of a text needs the rest."""

LARGE = limited(
    max_tokens=512, max_results=2 * MB, max_request_tokens=2 * MB, max_text_characters=MB
)
DOTS = "." * 100_000
WINDOWS = {"long_text": "window", "aggregation_strategy": "first"}


@pytest.mark.parametrize(
    ("task", "inputs", "parameters"),
    [
        ("token-classification", DOTS, {}),
        ("token-classification", DOTS, WINDOWS),
        ("qa", QaPair(question="a", context=DOTS), {}),
        ("embed", DOTS, {"spans": [(0, 3)]}),
        ("embed-all", DOTS, {"return_offsets": True, "truncation_direction": "left"}),
    ],
)
def test_memory_is_in_proportion_to_the_bytes(
    task: str, inputs: Any, parameters: Mapping[str, Any]
) -> None:
    tracemalloc.start()
    try:
        prepared(task, inputs, LARGE, **parameters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MOST_MB * MB + MOST_PER_BYTE * len(DOTS)


def test_a_run_that_the_normaliser_expands_is_refused(tmp_path: Path) -> None:
    """A character of three bytes may become 18 characters, and as many tokens."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"\u2581\u0635\u0644\u0649a"]
    backend = Backend(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=1))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.save(str(tmp_path / "tokenizer.json"))
    size, base = {"vocab_size": len(pieces)}, manifest()
    described = manifest(
        tokenizer=base.tokenizer.model_dump(exclude_none=True)
        | size
        | {"cls_id": 2, "sep_id": 3, "mask_id": 4},
        architecture=base.architecture.model_dump() | size,
    )
    model = TaskContext(described, Tokenizer(Bundle(described, tmp_path)), LARGE.limits)
    for task in ("embed", "token-classification"):
        with refused("text_too_long", 20000, 360000):
            prepared(task, "\ufdfa" * 20_000, model)
        [encoding] = prepared(task, "\ufdfa" * 3_000 + " a" * 3_000, model).encodings
        assert len(encoding) == (10 if task == "embed" else 512)
