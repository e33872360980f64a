"""Families beside BERT, from their checkpoints to a server's answers, and whose merges they read.

`tests/export/families` compares all families and heads with transformers.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import RobertaTokenizer

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.tokenizer import load_tokenizer
from tests.support.sources import file_of, name_of
from tests.support.tokenizer_kinds import byte_level

TEXTS = ["The harbour was quiet.", "A café\u0301 - in  Zürich, isn't it?", "🙂 pay"]
PAIRS = [("Where is the bank?", "The bank charges a fee."), (TEXTS[1], TEXTS[0])]


def save_merges(folder: Path, config: dict[str, str], settings: dict[str, str]) -> None:
    """Save a byte-level tokenizer as ``vocab.json`` and ``merges.txt``."""
    byte_level().model.save(str(folder))
    added = {"<mask>": byte_level().token_to_id("<mask>")}
    vocabulary = json.loads((folder / "vocab.json").read_text()) | added
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"} | config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"tokenizer_class": "RobertaTokenizer"}, {}),
        ({}, {"tokenizer_class": "RobertaTokenizerFast"}),
        ({"tokenizer_class": "X"}, {"tokenizer_class": "RobertaTokenizer"}),
    ],
    ids=str,
)
def test_a_class_of_byte_level_bpe_decides_and_not_the_architecture(
    config: dict[str, str], settings: dict[str, str], tmp_path: Path
) -> None:
    save_merges(tmp_path, config, settings)
    loaded, expected = load_tokenizer(tmp_path), RobertaTokenizer.from_pretrained(tmp_path)
    for texts in (*((text,) for text in TEXTS), *PAIRS):
        assert loaded.tokenizer.encode(*texts).ids == expected(*texts)["input_ids"]


@pytest.mark.parametrize("kind", ["HerbertTokenizerFast", "CLIPTokenizer", None])
def test_merges_of_another_class_are_refused(kind: str | None, tmp_path: Path) -> None:
    """As allegro/herbert-base-cased, a BERT whose BPE is of characters."""
    save_merges(tmp_path, {} if kind is None else {"tokenizer_class": kind}, {})
    message = f"is a {kind}, which vocab.json" if kind else "nothing says which class"
    with pytest.raises(ExportError, match=message):
        load_tokenizer(tmp_path)


NO_FAMILY = re.compile(
    r"Bert(Normalizer|(Pre|WordPiece)Tokenizer)|RobertaProcessing"  # of the tokenizers library
    r"|sentence_[a-z-]+_config\.json|[Cc]ol(BERT|bert)|sbert_ce"  # files of sentence-transformers
    r"|cloze-bert|cloze-distilbert|SpanBERT|the BERT paper"  # bundles of the project, citations
    r"|SIGTERM|LongText"  # words that hold the three letters of a family by chance
)


def words_of(file: Path) -> Iterator[str]:
    """Yield each name and each string of a source file, but not docstrings."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    prose = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for field in ("value", "id", "attr", "name", "arg", "module"):
            if isinstance(word := getattr(node, field, None), str) and node not in prose:
                yield word


def places(without: tuple[str, ...], pattern: str) -> list[str]:
    """Return where what serves and exports models matches; training uses transformers' classes."""
    return [
        f"{name}: {word}"
        for package in ("export", "model_store", "service")
        for file in sorted(file_of(package).rglob("*.py"))
        if not (name := name_of(file)).startswith(("export/train/", *without))
        for word in words_of(file)
        if re.search(pattern, NO_FAMILY.sub("", word), re.IGNORECASE)
    ]


def test_only_families_name_families() -> None:
    """A name of a family elsewhere, or its mark of words, is a place that a new one would miss."""
    stems = {"bert", *FAMILIES, *(family.class_prefix.lower() for family in FAMILIES.values())}
    assert places((), "|".join(stems)), "families themselves are found"
    # GLiNER's tensors have the name `bert_layer` for an encoder of any family.
    assert not places(("export/families/", "export/load/gliner.py"), "|".join(stems))
    assert not places(("export/load/tokenizer", "export/measure/masking.py"), r"##(?! )|Ġ|▁")
