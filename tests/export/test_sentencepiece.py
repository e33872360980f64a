"""Checkpoints with a SentencePiece model and no tokenizer.json.

`sentencepiece/*.model` were trained by sentencepiece 0.2.3 on the texts of the quality gate, with a
few rules that change the number of characters. `reference.json` has that library's ids, so it is an
oracle that shares no code with the converters.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertForMaskedLM

from cloze.export.errors import ExportError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer, load_tokenizer
from cloze.model_store.sequences import SpecialTokens
from tests.support.tokenizer_references import MODELS

REFERENCE = json.loads((MODELS / "reference.json").read_text())
LIKE_XLMR = {"tokenizer_class": "XLMRobertaTokenizer"}
LIKE_DEBERTA = {"tokenizer_class": "DebertaV2Tokenizer", "mask_token": "[MASK]"}


def folder_with(folder: Path, model: str, name: str, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(MODELS / f"{model}.model", folder / name)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def pieces(tokenizer: CheckpointTokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def shifted(ids: list[int]) -> list[int]:
    """Return the rows of XLM-R's embeddings: one before the pieces, unknown is 3."""
    return [number + 1 if number else 3 for number in ids]


def test_ids_are_those_of_sentencepiece(tmp_path: Path) -> None:
    folder_with(tmp_path, "unigram", "sentencepiece.bpe.model", LIKE_XLMR)
    loaded = load_tokenizer(tmp_path)
    for case in REFERENCE["unigram"]:
        assert pieces(loaded, case["text"]) == shifted(case["ids"]), case["text"]
    assert (loaded.special.cls, loaded.special.sep, loaded.special.separators) == (0, 2, 2)
    assert loaded.special.second_type == 0
    assert loaded.mask_token == "<mask>"
    [note] = loaded.notes
    assert "sentencepiece.bpe.model" in note


def test_a_mask_takes_the_space_before_it(tmp_path: Path) -> None:
    loaded = load_tokenizer(folder_with(tmp_path, "unigram", "sentencepiece.bpe.model", LIKE_XLMR))
    ids = pieces(loaded, "The <mask> was quiet.")
    without = pieces(loaded, "The"), pieces(loaded, "was quiet.")
    assert ids == [*without[0], loaded.mask_id, *without[1]]
    encoding = loaded.tokenizer.encode("The <mask> was quiet.", add_special_tokens=False)
    assert encoding.offsets[encoding.ids.index(loaded.mask_id or 0)] == (3, 10)


def test_rows_of_camembert_begin_with_tokens_that_are_not_used(tmp_path: Path) -> None:
    folder_with(tmp_path, "unigram", "sentencepiece.bpe.model", {})
    (tmp_path / "config.json").write_text('{"model_type": "camembert"}')
    loaded = load_tokenizer(tmp_path)
    for case in REFERENCE["unigram"]:
        rows = [number + 4 if number else 3 for number in case["ids"]]
        assert pieces(loaded, case["text"]) == rows, case["text"]
    assert (loaded.special.cls, loaded.special.sep) == (5, 6)  # the model's own <s> and </s>
    assert (loaded.special.separators, loaded.special.second_type) == (2, 0)
    assert loaded.mask_id == loaded.size - 1


def test_albert_lower_cases_unless_its_settings_say_no(tmp_path: Path) -> None:
    folder_with(tmp_path, "brackets", "spiece.model", {})
    (tmp_path / "config.json").write_text('{"model_type": "albert"}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.special.cls, loaded.special.sep) == (1, 2)
    assert (loaded.special.separators, loaded.special.second_type) == (1, 1)
    assert pieces(loaded, "THE HARBOUR was Qui\u00e9t") == pieces(loaded, "the harbour was quiet")
    assert pieces(loaded, "``It''") == pieces(loaded, '"it"')
    settings = {"do_lower_case": False, "keep_accents": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    kept = load_tokenizer(tmp_path)
    for case in REFERENCE["brackets"]:
        assert pieces(kept, case["text"]) == case["ids"], case["text"]


def test_the_mask_of_deberta_stands_after_the_pieces(tmp_path: Path) -> None:
    """Microsoft's checkpoints have no other file that names the token."""
    folder_with(tmp_path, "brackets", "spm.model", {"do_lower_case": False, "vocab_type": "spm"})
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2"}')
    loaded = load_tokenizer(tmp_path)
    [note] = loaded.notes
    assert "as DebertaV2Tokenizer" in note
    after = loaded.tokenizer.get_vocab_size(with_added_tokens=False)
    assert loaded.special == SpecialTokens(1, 2, after, separators=1, second_type=1)
    for case in REFERENCE["brackets"]:
        assert pieces(loaded, case["text"]) == case["ids"], case["text"]
    words = pieces(loaded, "The harbour"), pieces(loaded, "quiet.")
    assert pieces(loaded, "The harbour[MASK]quiet.") == [*words[0], after, *words[1]]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"[MASK]": after}))
    assert load_tokenizer(tmp_path).special == loaded.special
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(LIKE_DEBERTA))
    assert load_tokenizer(tmp_path).special == loaded.special


def test_lower_case_and_punctuation_of_deberta_are_settings(tmp_path: Path) -> None:
    folder_with(tmp_path, "brackets", "spm.model", LIKE_DEBERTA)
    loaded = load_tokenizer(tmp_path)
    assert pieces(loaded, "THE") != pieces(loaded, "the")
    folder_with(tmp_path, "brackets", "spm.model", LIKE_DEBERTA | {"do_lower_case": True})
    assert pieces(load_tokenizer(tmp_path), "THE") == pieces(loaded, "the")
    folder_with(tmp_path, "brackets", "spm.model", LIKE_DEBERTA | {"split_by_punct": True})
    split = load_tokenizer(tmp_path)
    assert pieces(split, "The harbour. was") == [
        *pieces(loaded, "The harbour"), *pieces(split, "."), *pieces(split, " was"),
    ]  # fmt: skip
    assert pieces(split, "harbour.was") != pieces(loaded, "harbour.was")


def test_a_checkpoint_of_a_model_alone_is_exported(tmp_path: Path) -> None:
    folder_with(tmp_path, "unigram", "sentencepiece.bpe.model", LIKE_XLMR)
    rows = load_tokenizer(tmp_path).size
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=64, vocab_size=rows)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.tokenizer.size == rows
    assert any("sentencepiece.bpe.model" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"\xff" * 99, LIKE_XLMR, "sentencepiece.bpe.model is damaged"),
        ((MODELS / "bpe.model").read_bytes(), LIKE_XLMR, "is not a Unigram model"),
        (None, {}, "give tokenizer_class in tokenizer_config"),
        (None, {"tokenizer_class": "BertweetTokenizer"}, "a BertweetTokenizer is not supported"),
        (None, {"tokenizer_class": "BertTokenizer"}, "a BertTokenizer is not supported"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, content: bytes | None, settings: dict[str, Any], message: str
) -> None:
    folder_with(tmp_path, "unigram", "sentencepiece.bpe.model", settings)
    if content is not None:
        (tmp_path / "sentencepiece.bpe.model").write_bytes(content)
    with pytest.raises(ExportError, match=message):
        load_tokenizer(tmp_path)
