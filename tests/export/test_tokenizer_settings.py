"""Each setting of a tokenizer that transformers reads is honoured, named in a note, or refused.

Every setting of each file is changed, and the ids are compared with those of transformers on the
same folder. The oracle is the class that reads ``tokenizer.json`` as it is: the others rebuild
parts of the file from their own defaults.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer

from cloze.export.errors import ExportError
from cloze.export.families import FAMILIES
from cloze.export.load.tokenizer import load_tokenizer
from tests.support.family_checkpoints import TOKENIZERS
from tests.support.fine_tuning import slow_but
from tests.support.tokenizer_kinds import wordpiece
from tests.support.tokenizer_references import entry, lines, served

Files = dict[str, dict[str, Any]]

SHORT = 7
"""Tokens of a text that is cut."""

TEXTS = [
    *lines(8),
    "The HARBOUR was quiet, isn't it? [MASK]  <mask> bank. The new fee!",
    "[new] [NEW] [other]bank <new> new kin [UNK] <unk> [CLS] <s>",
    "the bank charges a fee at the harbour",
]
SPARE = 8
"""Rows of the embeddings beyond the vocabulary."""


@cache
def tokenizer_of(family: str) -> str:
    return TOKENIZERS.get(family, wordpiece)().to_str()


def files_of(family: str) -> Files:
    """Return the files of a tokenizer as transformers saves them, with the default settings."""
    parts = json.loads(tokenizer_of(family))
    backend = Tokenizer.from_str(tokenizer_of(family))
    names = {
        f"{name}_token": token
        for name in ("pad", "unk", "cls", "sep", "mask")
        for token in (f"[{name.upper()}]", {"cls": "<s>", "sep": "</s>"}.get(name, f"<{name}>"))
        if backend.token_to_id(token) is not None
    }
    return {
        "tokenizer.json": parts,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "model_max_length": 4000,
            **names,
        },
        "config.json": {"model_type": family, "vocab_size": backend.get_vocab_size() + SPARE},
    }


Encodings = list[tuple[list[int], list[int]]]
Words = list[tuple[list[int], list[str]]]
"""For each text: the number of tokens per word, and the characters of each token without spaces."""

Results = tuple[Encodings, list[str], Words, int | None]


def words_of(text: str, words: Sequence[object], offsets: Iterable[tuple[int, int]]) -> Any:
    """Return the tokens per word and their characters; see `Words`."""
    counts = [len([*tokens]) for _, tokens in groupby(words)]
    return counts, [text[start:end].strip() for start, end in offsets]


def has_white_space(text: str, words: Sequence[object], places: Sequence[tuple[int, int]]) -> bool:
    """Return whether white space is inside a word: a word of ours ends there."""
    parts = [[*tokens] for _, tokens in groupby(range(len(words)), key=words.__getitem__)]
    insides = [text[places[part[0]][0] : places[part[-1]][1]] for part in parts]
    return any(re.search(r"\S\s", inside) for inside in insides)


def theirs(folder: Path) -> Results:
    """Return ids and types of texts, of pairs and of what is cut; decoded texts; words; the limit."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    encodings: Encodings = []
    for text, second in pairwise(TEXTS):
        for given in ((text,), (text, second)):
            for limit in ({}, {"truncation": True, "max_length": SHORT}):
                made = tokenizer(*given, **limit)
                ids = made["input_ids"]
                encodings.append((ids, made.get("token_type_ids", [0] * len(ids))))
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in encodings]
    words = []
    for text in TEXTS:
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        own, places = made.word_ids(), made["offset_mapping"]
        divided = has_white_space(text, own, places)
        words.append(([], []) if divided else words_of(text, own, places))
    return encodings, decoded, words, tokenizer.model_max_length


def ours(folder: Path) -> Results:
    limit = load_tokenizer(folder).max_tokens
    tokenizer = served(folder).tokenizer
    keep_end = tokenizer.truncation_side == "left"
    part = slice(2 - SHORT, None) if keep_end else slice(SHORT - 2)
    encodings: Encodings = []
    for text, second in pairwise(TEXTS):
        first, other = tokenizer.ids([text, second])
        singles = [tokenizer.encode(first), tokenizer.encode(first[part])]
        encodings += singles
        # As for transformers, an empty second text is none.
        for most, single in zip((10**4, SHORT), singles, strict=True):
            made = tokenizer.pair(first, other, most, keep_end=keep_end)
            encodings.append(made if second else single)
    pairs = [(e.input_ids.tolist(), e.token_type_ids.tolist()) for e in encodings]
    decoded = tokenizer.decode([ids for ids, _ in pairs], skip_special_tokens=True)
    spans = [(text, tokenizer.spans(text)) for text in TEXTS]
    words = [words_of(text, [*one.words], one.offsets()) for text, one in spans]
    return pairs, decoded, words, limit


def write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))


def oracle(folder: Path) -> Results | None:
    """Return `theirs`; None if transformers cannot use the files."""
    try:
        return theirs(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the library may panic
        return None


def compare(folder: Path, files: Files, key: str) -> str:
    """Return what became of a setting; raise AssertionError if it is ignored silently."""
    write(folder, files)
    expected = oracle(folder)
    try:
        notes = " ".join(load_tokenizer(folder).notes)
        mine = ours(folder)
    except ExportError as error:
        return f"refused: {error}"
    if key in notes:
        return f"note: {notes}"
    if expected is None:
        return "no oracle"
    for one, other in zip(mine[0], expected[0], strict=True):
        assert one == other, key
    assert mine[1] == expected[1], key
    for mine_of_text, words in zip(mine[2], expected[2], strict=True):
        assert not words[0] or mine_of_text == words, key
    limit = expected[3]
    assert mine[3] == (limit if limit is not None and limit < 10**6 else None), key
    return "same"


def changes(value: Any) -> list[Any]:
    """Return other values of a setting."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1]
        case float():
            return [value + 0.5]
        case str():
            return ["left" if value == "right" else "[new]", ""]
        case None:
            return [True, 0.5, "[new]"]
    return [None]


def leaves(parts: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of each part of a ``tokenizer.json`` but those of vocabularies."""
    if at and at[-1] in ("vocab", "merges", "precompiled_charsmap"):
        return
    if at:
        yield at
    if isinstance(parts, dict | list):
        items = parts.items() if isinstance(parts, dict) else enumerate(parts)
        for key, value in items:
            if not (isinstance(value, dict) and str(value.get("content")).isspace()):
                yield from leaves(value, (*at, key))


def changed(parts: Any, at: tuple[str | int, ...]) -> Iterator[Any]:
    """Yield copies of the parts with other values at a place."""
    inner = parts
    for key in at:
        inner = inner[key]
    for value in changes(inner):
        copied = inner = json.loads(json.dumps(parts))
        for key in at[:-1]:
            inner = inner[key]
        inner[at[-1]] = value
        yield copied


KINDS = {TOKENIZERS.get(family, wordpiece): family for family in FAMILIES}
"""One family of each kind of tokenizer."""

each_kind = pytest.mark.parametrize("family", slow_but(KINDS.values(), KINDS[wordpiece]))
"""Each takes seconds; only WordPiece runs with the other tests."""


@each_kind
def test_every_part_of_tokenizer_json_is_honoured_or_refused(family: str, tmp_path: Path) -> None:
    base = files_of(family)
    assert compare(tmp_path, base, "no setting") == "same"
    parts, results = base["tokenizer.json"], set()
    for at in leaves(parts):
        for other in changed(parts, at):
            result = compare(tmp_path, base | {"tokenizer.json": other}, str(at[-1]))
            results.add(result.partition(":")[0])
    assert results >= {"same", "refused"}


SETTINGS: dict[str, list[Any]] = {
    "add_prefix_space": [True, False],
    "additional_special_tokens": [["[new]"], ["[new]", "kin", "[NEW]", "a", "b", "c", "d", "e", "f"]],
    "clean_up_tokenization_spaces": [True, False],
    "do_lower_case": [True, False],
    "extra_special_tokens": [["kin"], {"image_token": "[new]"}, {"x": "bank"}, []],
    "image_token": ["[new]"],
    "max_len": [9],
    "model_input_names": [["input_ids", "attention_mask"], ["input_ids", "token_type_ids"]],
    "model_max_length": [9, None, 10**30],
    "split_special_tokens": [True, False],
    "strip_accents": [True, False],
    "tokenize_chinese_chars": [True, False],
    "truncation_side": ["left", "right", "middle"],
    **{f"{name}_token": ["[new]", "bank", {"__type": "AddedToken"} | entry("kin", lstrip=True), None]
       for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
}  # fmt: skip
"""Other values of the settings that change what a tokenizer returns."""

IGNORED = {"add_prefix_space", "do_lower_case", "strip_accents", "tokenize_chinese_chars"}
"""Settings that only other classes read; see `test_tokenizer`."""


@each_kind
def test_every_setting_is_honoured_named_or_refused(family: str, tmp_path: Path) -> None:
    base = files_of(family)
    write(tmp_path, base)
    usual = theirs(tmp_path)
    still = set()
    for key, values in SETTINGS.items():
        results = set()
        for value in values:
            config = base["tokenizer_config.json"] | {key: value}
            if key == "max_len":  # an older name
                del config["model_max_length"]
            compare(tmp_path, base | {"tokenizer_config.json": config}, key)
            results.add(oracle(tmp_path) == usual)
        if results == {True}:
            still.add(key)
    if family == KINDS[wordpiece]:
        assert still <= IGNORED | {"clean_up_tokenization_spaces"}, "the test can fail"


@pytest.mark.parametrize("family", KINDS.values())
@pytest.mark.parametrize("listed", [False, True], ids=["alone", "decoder"])
def test_tokens_of_other_files_are_honoured(family: str, listed: bool, tmp_path: Path) -> None:
    base = files_of(family)
    size = Tokenizer.from_str(tokenizer_of(family)).get_vocab_size()
    if listed:
        base["tokenizer_config.json"] |= {"added_tokens_decoder": {}}
    special = {f"{name}_token": ["[new]", entry("kin", lstrip=True), entry("[MASK]", rstrip=True)]
               for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}  # fmt: skip
    special["additional_special_tokens"] = [["[new]"]]
    special["extra_special_tokens"] = [["kin", "[NEW]"]]
    for key, values in special.items():
        for value in values:
            files = base | {"special_tokens_map.json": {key: value}}
            assert compare(tmp_path, files, key) == "same"
    (tmp_path / "special_tokens_map.json").unlink()
    for tokens in ({"[new]": size}, {"[new]": size + 1, "kin": size}, {"bank": 1}):
        result = compare(tmp_path, base | {"added_tokens.json": tokens}, "added_tokens")
        assert result == "same" or "should have id" in result


def test_a_token_without_a_row_is_named_and_read_as_text(tmp_path: Path) -> None:
    base = files_of("bert")
    base["config.json"]["vocab_size"] -= SPARE
    config = base["tokenizer_config.json"] | {"extra_special_tokens": ["[new]"]}
    write(tmp_path, base | {"tokenizer_config.json": config})
    loaded = load_tokenizer(tmp_path)
    assert "1 listed tokens without a row in the embeddings are left out" in loaded.notes[0]
    assert loaded.size == base["config.json"]["vocab_size"]


def without_special_tokens(folder: Path, family: str, kind: str) -> Path:
    """Write the files of a class, with a ``tokenizer.json`` that adds no special tokens."""
    base = files_of(family)
    base["tokenizer.json"] |= {"post_processor": None}
    base["tokenizer_config.json"] |= {"tokenizer_class": kind}
    write(folder, base)
    return folder


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_a_tokenizer_that_adds_no_special_tokens_is_refused(kind: str, tmp_path: Path) -> None:
    without_special_tokens(tmp_path, "bert", kind)
    ids = PreTrainedTokenizerFast.from_pretrained(tmp_path)("the bank")["input_ids"]
    assert not {2, 3} & set(ids)
    with pytest.raises(ExportError, match=f"no post_processor .* the class {kind} adds none"):
        load_tokenizer(tmp_path)
    without_special_tokens(tmp_path, "roberta", "RobertaTokenizer")
    with pytest.raises(ExportError, match="has no post_processor that adds special tokens: texts"):
        load_tokenizer(tmp_path)


def test_another_class_adds_the_special_tokens_of_its_family(tmp_path: Path) -> None:
    without_special_tokens(tmp_path, "bert", "BertTokenizer")
    expected = BertTokenizer.from_pretrained(tmp_path)("the bank", "a fee")
    made = load_tokenizer(tmp_path).tokenizer.encode("the bank", "a fee")
    assert (made.ids, made.type_ids) == (expected["input_ids"], expected["token_type_ids"])


@pytest.mark.parametrize("prefix", [False, True])
def test_a_class_of_its_own_reads_the_space_before_a_text(prefix: bool, tmp_path: Path) -> None:
    base = files_of("roberta")
    base["tokenizer_config.json"] |= {
        "tokenizer_class": "RobertaTokenizer", "add_prefix_space": prefix
    }  # fmt: skip
    write(tmp_path, base)
    expected = RobertaTokenizer.from_pretrained(tmp_path)("The harbour was")["input_ids"]
    assert load_tokenizer(tmp_path).tokenizer.encode("The harbour was").ids == expected


def test_dropout_of_the_training_is_switched_off(tmp_path: Path) -> None:
    base = files_of("roberta")
    parts = json.loads(tokenizer_of("roberta"))
    parts["model"]["dropout"] = 0.9
    write(tmp_path, base | {"tokenizer.json": parts})
    loaded = load_tokenizer(tmp_path)
    expected = Tokenizer.from_str(tokenizer_of("roberta")).encode(TEXTS[-1]).ids
    assert all(loaded.tokenizer.encode(TEXTS[-1]).ids == expected for _ in range(5))
    assert "dropout" in loaded.notes[0]
