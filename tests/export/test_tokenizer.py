"""Tokenization against published ids, and vocabularies against their own ``tokenizer.json``."""

import json
import lzma
import shutil
import string
import weakref
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, processors
from transformers import AutoTokenizer, BertTokenizerFast, MPNetTokenizer

from cloze.export.errors import ExportError
from cloze.export.load.tokenizer import describe_tokenizer, load_tokenizer, lower_cased
from cloze.model_store import Bundle, Store
from cloze.service.text.tokenizer import Tokenizer
from tests.support.tokenizer_kinds import unigram, wordpiece
from tests.support.tokenizer_references import entry
from tests.support.vocabulary import vocabulary

SENTENCES = [
    "Hello, World! It's 3.14 o'clock.",
    "Ünïcödé naïve café, coöperate; ÅNGSTRÖM",
    "机器学习是人工智能的一个分支。BERT模型很有用!",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "日本語のテキスト と English mixed",
    "tabs\tand\nnewlines\u00a0and\u200bzero width",
    "emoji 😀 and a verylongwordthatisnotinanyvocabulary" + "x" * 120,
    "",
]


def test_golden_questions_come_out_identical(external_data: Path, tmp_path: Path) -> None:
    """All 5,285 questions, by ``tokenizer.json`` and by ``vocab.txt`` alone."""
    folder = external_data / "tokenization" / "bert-base-uncased"
    with lzma.open(external_data / "tokenization" / "bert-base-uncased-golden.json.xz") as file:
        golden = json.load(file)
    texts = [entry["original"] for entry in golden["tokens"]]
    ids = golden["ids"]
    assert len(texts) == len(ids) == 5285
    shutil.copy(folder / "vocab.txt", tmp_path)
    for source in (folder, tmp_path):
        tokenizer = load_tokenizer(source).tokenizer
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        assert [encoding.ids for encoding in encodings] == ids


@pytest.mark.parametrize(
    "name", ["bert-base-uncased", "bert-base-multilingual-cased", "bert-base-chinese"]
)
def test_published_vocabularies_agree_with_their_tokenizer_json(
    external_data: Path, tmp_path: Path, name: str
) -> None:
    folder = external_data / "tokenization" / name
    expected = Backend.from_file(str(folder / "tokenizer.json"))
    shutil.copy(folder / "vocab.txt", tmp_path)
    lowercase = name == "bert-base-uncased"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    for source in (folder, tmp_path):
        loaded = load_tokenizer(source)
        assert loaded.size == expected.get_vocab_size()
        assert loaded.lowercase == lowercase
        for text in SENTENCES:
            for special in (False, True):
                ours = loaded.tokenizer.encode(text, add_special_tokens=special)
                theirs = expected.encode(text, add_special_tokens=special)
                assert (ours.ids, ours.offsets) == (theirs.ids, theirs.offsets)
            assert loaded.tokenizer.decode(ours.ids) == expected.decode(theirs.ids)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"do_lower_case": False}, "The Door of Café"),
        ({"do_lower_case": True}, "The Door of Café"),
        ({"strip_accents": False, "do_lower_case": True}, "The Café"),
        ({"strip_accents": True, "do_lower_case": False}, "The Café"),
        ({"tokenize_chinese_chars": False, "do_lower_case": True}, "北京 the"),
    ],
)
def test_settings_overrule_tokenizer_json_as_in_transformers(
    tmp_path: Path, settings: dict[str, bool], text: str
) -> None:
    pieces = [*vocabulary(), *string.ascii_uppercase, *"é北京", *(f"##{c}" for c in "éECDT北京")]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").unlink(missing_ok=True)
    config = {"tokenizer_class": "BertTokenizerFast"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = BertTokenizerFast.from_pretrained(tmp_path)(text)["input_ids"]
    loaded = load_tokenizer(tmp_path)
    assert loaded.tokenizer.encode(text).ids == expected
    assert loaded.lowercase is settings.get("do_lower_case", True)
    if settings != {"do_lower_case": True}:
        [note] = loaded.notes
        assert "overrules" in note


def test_a_normaliser_of_another_kind_keeps_the_case_as_in_transformers(tmp_path: Path) -> None:
    """As paraphrase-multilingual-MiniLM-L12-v2, a BERT with XLM-R's tokenizer."""
    backend = unigram()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC()])
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    text = "The HARBOUR was Quiet"
    expected = AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"]
    assert loaded.tokenizer.encode(text).ids == expected
    assert expected != loaded.tokenizer.encode(text.lower()).ids
    assert not loaded.lowercase
    [note] = loaded.notes
    assert "keeps the case" in note


@pytest.mark.parametrize("classes", [(None, "MPNetTokenizer"), ("MPNetTokenizer", "BertTokenizer")])
def test_the_class_of_a_vocabulary_may_stand_in_the_config_of_the_model(
    tmp_path: Path, classes: tuple[str | None, str]
) -> None:
    """As in transformers, the settings of the tokenizer go first."""
    names = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join([*names, "the", "king"]))
    files = ("tokenizer_config.json", "config.json")
    for name, kind in zip(files, classes, strict=True):
        settings = {"model_type": "bert"} | ({} if kind is None else {"tokenizer_class": kind})
        (tmp_path / name).write_text(json.dumps(settings))
    expected = MPNetTokenizer.from_pretrained(tmp_path)("the king", "the")["input_ids"]
    assert load_tokenizer(tmp_path).tokenizer.encode("the king", "the").ids == expected


@pytest.mark.parametrize(("piece", "lowercase"), [("é", False), ("##ü", False), ("e", True)])
def test_a_vocabulary_with_accents_is_cased(tmp_path: Path, piece: str, lowercase: bool) -> None:
    """Uncased normalisation removes accents, so a vocabulary made with it has none."""
    (tmp_path / "vocab.txt").write_text("\n".join([*vocabulary(), piece]) + "\n")
    loaded = load_tokenizer(tmp_path)
    assert loaded.lowercase is lowercase
    assert f"taken as {'uncased' if lowercase else 'cased'}" in str(loaded.notes)


def test_tokens_added_beside_a_vocabulary_are_kept(tmp_path: Path) -> None:
    size = len(vocabulary())
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    decoder: dict[int, dict[str, Any]] = {size + 1: {"content": "[E1]", "special": True}}
    decoder |= {size: {"content": "covid"}, 0: {"content": "[PAD]", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.size == size + 2
    ids = loaded.tokenizer.encode("the covid [E1] king", add_special_tokens=False).ids
    assert ids == [vocabulary().index("the"), size, size + 1, vocabulary().index("king")]
    assert loaded.tokenizer.encode("Covid", add_special_tokens=False).ids == [size]
    assert size + 1 not in loaded.tokenizer.encode("[e1]").ids, "special tokens keep their case"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"covid": size + 5}))
    message = r"'covid' should have id \d+, but the vocabulary leaves it"
    with pytest.raises(ExportError, match=message):
        load_tokenizer(tmp_path)


LISTED: dict[str, dict[str, Any]] = {
    "decoder": {"tokenizer_config.json": {"added_tokens_decoder": {
        "1": entry("[UNK]", special=True), "5": entry("[unused0]", special=True),
    }}},
    "case": {
        "tokenizer_config.json": {"added_tokens_decoder": {"6": entry("[e1]", normalized=True)}}
    },
    "no case": {"tokenizer_config.json": {"added_tokens_decoder": {"6": entry("[e1]")}}},
    "word": {"tokenizer_config.json": {"added_tokens_decoder": {
        "7": entry("kin", single_word=True, normalized=True),
    }}},
    "no word": {"tokenizer_config.json": {"added_tokens_decoder": {"7": entry("kin")}}},
    "strips": {"tokenizer_config.json": {"added_tokens_decoder": {
        "4": entry("[MASK]", lstrip=True, special=True), "5": entry("[unused0]", rstrip=True),
    }}},
    "map": {"special_tokens_map.json": {"additional_special_tokens": ["[unused0]", "[e1]"]}},
    "settings": {"tokenizer_config.json": {"additional_special_tokens": ["[unused0]"]}},
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["[unused0]", "[new]"]}},
    "map beside decoder": {
        "special_tokens_map.json": {"additional_special_tokens": ["[unused0]"]},
        "tokenizer_config.json": {"added_tokens_decoder": {"6": entry("[e1]", special=True)}},
    },
    "file": {"added_tokens.json": {"[e1]": 6}},
    "special file": {
        "added_tokens.json": {"[e1]": 6, "[MASK]": 4},
        "special_tokens_map.json": {"extra_special_tokens": ["[e1]"], "mask_token": "[MASK]"},
    },
}  # fmt: skip
"""Which files list tokens that ``vocab.txt`` has, and how."""


@pytest.mark.parametrize("files", LISTED.values(), ids=LISTED.keys())
def test_listed_tokens_of_the_vocabulary_are_found_in_texts_as_in_transformers(
    tmp_path: Path, files: dict[str, dict[str, Any]]
) -> None:
    pieces = [*vocabulary()[:5], "[unused0]", "[e1]", "kin", *vocabulary()[5:], "[", "]"]
    assert pieces[4] == "[MASK]"
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    files = files | {"tokenizer_config.json": settings | files.get("tokenizer_config.json", {})}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    loaded, expected = load_tokenizer(tmp_path), BertTokenizerFast.from_pretrained(tmp_path)
    for text in (
        "a [unused0] b", "a [UNUSED0] b[unused0]", "the [e1] [E1]", "king kin Kin", "a [new] b",
        "the [MASK] king [mask]", "a  [unused0]  [SEP] b",
    ):  # fmt: skip
        theirs = expected(text, return_offsets_mapping=True)
        ours = loaded.tokenizer.encode(text)
        assert ours.ids == theirs["input_ids"], text
        assert ours.offsets == theirs["offset_mapping"], text


def test_settings_of_a_vocabulary_are_those_of_transformers(tmp_path: Path) -> None:
    pieces = [*vocabulary(), "北京", "北", "京", "café", "cafe"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n")
    for change in ({"tokenize_chinese_chars": False}, {"strip_accents": False}):
        settings = {"do_lower_case": True} | change
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        theirs = BertTokenizerFast(str(tmp_path / "vocab.txt"), **settings)
        expected = theirs("北京 the café")["input_ids"]
        assert load_tokenizer(tmp_path).tokenizer.encode("北京 the café").ids == expected


WORD_LEVEL = {"type": "WordLevel", "vocab": {}, "unk_token": "a"}
WORDS = {"version": "1.0", "model": WORD_LEVEL, "added_tokens": []}
WRONG: list[tuple[dict[str, str | bytes], str]] = [
    ({}, "no tokenizer"),
    ({"vocab.txt": "hello\nworld\n"}, "not a WordPiece vocabulary"),
    ({"vocab.txt": b"\xff\xfe\x00"}, "not UTF-8"),
    ({"vocab.txt": "[UNK]\n[CLS]\na\n"}, r"no \[SEP\] token"),
    ({"tokenizer.json": "{"}, "damaged"),
    ({"tokenizer.json": json.dumps(WORDS)}, "WordLevel tokenizer"),
    ({"vocab.txt": "[UNK]\n", "tokenizer_config.json": "[]"}, "not a JSON object"),
    *(
        ({"vocab.txt": "[UNK]\n", file: json.dumps({name: value})}, message)
        for file, name, value, message in (
            ("tokenizer_config.json", "tokenizer_class", "BertJapaneseTokenizer", "is a BertJapan"),
            ("config.json", "tokenizer_class", "BertJapaneseTokenizer", "is a BertJapaneseTokeniz"),
            ("tokenizer_config.json", "word_tokenizer_type", "mecab", "supported is 'basic'"),
            ("tokenizer_config.json", "subword_tokenizer_type", "character", "is 'wordpiece'"),
        )
    ),
]


@pytest.mark.parametrize(("files", "message"), WRONG)
def test_a_wrong_tokenizer_gets_one_clear_line(
    tmp_path: Path, files: dict[str, str | bytes], message: str
) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(ExportError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def tokenizer(tiny_store: Path) -> Tokenizer:
    return Tokenizer(Store(tiny_store).open("bert"))


def test_equal_files_have_one_vocabulary_in_memory(tiny_store: Path, tmp_path: Path) -> None:
    bundle = Store(tiny_store).open("bert")
    copy = Path(shutil.copytree(bundle.path, tmp_path / "copy"))
    first, second = Tokenizer(bundle), Tokenizer(Bundle(bundle.manifest, copy))
    assert second._backend is first._backend
    with (copy / bundle.manifest.tokenizer.file).open("a") as file:
        file.write("\n")
    third = Tokenizer(Bundle(bundle.manifest, copy))
    assert third._backend is not first._backend, "only the bytes decide"
    unused = weakref.ref(third._vocabulary)
    del third
    assert unused() is None, "a reload frees it"


_PARTS = ("the", "king", "Kings", "red", "x" * 40, "a1b", "[MASK]", "]", "Ünï", "机", "e\u0301", "\t",
          "\n", "\u00a0", "\x1c", "\x00", " ", "  ", ".", "?!", "'", "-", "_", "$", "<s>")  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(_PARTS), max_size=8).map("".join), max_size=6))
def test_words_are_remembered_and_nothing_else_changes(
    tokenizer: Tokenizer, texts: list[str]
) -> None:
    expected = [tokenizer._backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert tokenizer.ids(texts) == expected
    assert tokenizer.ids(texts) == expected, "now by the words"


def test_what_is_remembered_is_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloze.service.text.tokenizer._MOST_WORDS", 10)
    known = tokenizer._vocabulary.words
    for number in range(30):
        tokenizer.ids([f"king {number} {number}{'y' * 40}"])
        assert str(number) in known
        assert len(known) <= 10
        assert max(map(len, known)) <= 32, "no client fills the memory with long words"


def test_a_vocabulary_with_words_beside_it_remembers_none(tiny_store: Path, tmp_path: Path) -> None:
    """The library finds an added token within words, so that these do not stand for themselves."""
    bundle = Store(tiny_store).open("bert")
    parts = json.loads(bundle.file(bundle.manifest.tokenizer.file).read_text())
    size = bundle.manifest.tokenizer.vocab_size
    parts["added_tokens"].append({"id": size, **entry("kin")})
    (tmp_path / bundle.manifest.tokenizer.file).write_text(json.dumps(parts))
    spec = bundle.manifest.tokenizer.model_copy(update={"vocab_size": size + 1})
    grown = Tokenizer(Bundle(bundle.manifest.model_copy(update={"tokenizer": spec}), tmp_path))
    assert size in grown.ids(["the king"])[0]
    assert size in grown.ids(["the king"])[0], "not by the words of the first time"


def test_pairs_are_cut_as_transformers_cuts_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Against the library's own ``longest_first``."""
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    backend = load_tokenizer(tmp_path).tokenizer
    for first in range(14):
        for second in range(14):
            for limit in range(5, 16):
                backend.enable_truncation(limit, strategy="longest_first")
                texts = "a " * first, "b " * second
                expected = backend.encode(*texts)
                encoding = tokenizer.pair(*tokenizer.ids(texts), limit)
                assert encoding.input_ids.tolist() == expected.ids
                assert encoding.token_type_ids.tolist() == expected.type_ids


@pytest.mark.parametrize(
    "pair", ["[CLS] $A [MASK] $B [SEP]", "[CLS] $A $B [SEP]", "[CLS] $A [SEP] $B", "$A [SEP] $B"]
)
def test_special_tokens_in_other_places_are_refused(tmp_path: Path, pair: str) -> None:
    backend = wordpiece()
    names = ("[CLS]", "[SEP]", "[MASK]")
    special = [(name, backend.token_to_id(name)) for name in names]
    template = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special_tokens=special)
    backend.post_processor = template
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ExportError, match="puts its special tokens where no supported family"):
        load_tokenizer(tmp_path)


def test_only_a_tokenizer_that_keeps_case_is_changed_to_lower_case() -> None:
    """Another file would be another space of vectors."""
    backend = wordpiece()
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    lowering = describe_tokenizer(backend)
    assert lower_cased(lowering) is lowering
    backend = wordpiece()
    backend.normalizer = normalizers.NFKC()
    keeping = describe_tokenizer(backend)
    changed = lower_cased(keeping)
    assert changed.lowercase
    assert changed.tokenizer.encode("THE").ids == backend.encode("the").ids
    assert keeping.tokenizer.encode("THE").ids != backend.encode("the").ids
