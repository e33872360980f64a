"""Long texts are tokenized in pieces, with the tokens of the whole; abandoned work ends."""

import json
from array import array
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.text import pieces
from cloze.service.text.pieces import Boundary, divide, find_boundary, groups
from cloze.service.text.tokenizer import NO_WORD, Spans, Tokenizer
from tests.support.refusals import refused
from tests.support.tokenizer_kinds import byte_level, undivided, unigram
from tests.support.tokenizer_references import KINDS

BUNDLE = Store(DEFAULT_ROOT).open("cloze-bert")
TOKENIZER = Tokenizer(BUNDLE)

WORDS = [
    "river", "Éclair", "un" * 60, "3.14", "a,b", "[MASK]", "[SEP]", "水火", "水" * 9, "\u0301x",
    "\u00a0", "\u200b", "e\u0301", "\x00", "🙂", "\u2028", "don't", "<mask>", " <mask>", "İ", "ﬁ",
    "x!?", ";;", "한국", "\u00a0\u0301", "\u3000\u0e33",
]  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.sampled_from(WORDS), st.text(max_size=6), st.sampled_from(list(" \n\t .,;:!?水")))
).map("".join)


BACKENDS = {
    "bert": TOKENIZER._backend,
    "bytes": byte_level(),
    "unigram": unigram(),
    "marks": unigram(splits_first=False),
    "xlm-roberta": KINDS["xlm-roberta"].reference(),
}


def places_of(backend: Backend) -> Boundary:
    places = find_boundary(json.loads(backend.to_str()))
    assert places is not None
    return places


def whole(text: str, backend: Backend = BACKENDS["bert"]) -> Spans:
    encoding = backend.encode(text, add_special_tokens=False)
    words = [NO_WORD if word is None else word for word in encoding.word_ids]
    starts, ends = [first for first, _ in encoding.offsets], [end for _, end in encoding.offsets]
    return Spans(*(array("i", part) for part in (encoding.ids, starts, ends, words)))


DEBERTA = KINDS["deberta"].reference()


def ids_in_pieces(text: str, size: int) -> list[int]:
    parts = [part for _, part in divide(text, places_of(DEBERTA), size)]
    return [number for part in parts for number in whole(part, DEBERTA).ids]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, size=st.integers(1, 30))
def test_pieces_have_the_ids_of_the_whole_after_a_normaliser_that_strips(
    text: str, size: int
) -> None:
    assert ids_in_pieces(text, size) == [*whole(text, DEBERTA).ids]


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, size=st.integers(1, 30))
def test_pieces_have_the_tokens_of_the_whole(kind: str, text: str, size: int) -> None:
    backend = BACKENDS[kind]
    parts = list(divide(text, places_of(backend), size))
    assert "".join(content for _, content in parts) == text
    spans = Spans()
    for start, content in parts:
        assert text[start : start + len(content)] == content
        spans.add(backend.encode(content, add_special_tokens=False), start)
    expected = whole(text, backend)
    assert (spans.ids, spans.offsets()) == (expected.ids, expected.offsets())
    if kind == "bert":  # other kinds number white space among the words
        assert spans.words == expected.words


@pytest.mark.parametrize(
    "text",
    [" ".join(["river walk"] * 20_000), "水" * 50_000, "river," * 20_000, "x" * 40_000, "a b" * 5],
    ids=["words", "ideographs", "commas", "one-word", "short"],
)
def test_long_texts_are_divided_and_give_the_same(text: str) -> None:
    assert TOKENIZER.spans(text) == whole(text)
    texts = (text, "walk", text)
    assert [*map(list, TOKENIZER.ids(texts))] == [[*whole(part).ids] for part in texts]
    longest = max(len(content) for _, content in divide(text, places_of(BACKENDS["bert"])))
    assert longest <= (40_000 if text.startswith("x") else 16_384)


EXPANDING = unigram()
EXPANDING.normalizer = normalizers.NFKC()
EIGHTEEN = "\ufdfa"
"""A character that becomes 18."""


def test_groups_of_many_texts_are_bounded() -> None:
    made = groups(["river " * 100] * 1000, places_of(BACKENDS["bert"]))
    sizes = [sum(len(piece.content) for piece in group) for group in made]
    assert sum(sizes) == 600_000
    assert max(sizes) <= pieces._GROUP_CHARACTERS


@pytest.mark.parametrize("rest", [" ", " river", " river" * 20])
def test_groups_are_bounded_after_a_normaliser_that_expands(rest: str) -> None:
    text = (EIGHTEEN + rest) * (100_000 // len(rest))
    made = [*groups([text], places_of(EXPANDING), expands=True)]
    sizes = [sum(len(normalize("NFKC", piece.content)) for piece in group) for group in made]
    assert max(sizes) <= pieces._GROUP_CHARACTERS
    assert len(made) >= sum(sizes) // pieces._GROUP_CHARACTERS
    assert "".join(piece.content for group in made for piece in group) == text
    start = text[:6000]
    parts = [part for _, part in divide(start, places_of(EXPANDING), 900)]
    ids = [number for part in parts for number in whole(part, EXPANDING).ids]
    assert ids == [*whole(start, EXPANDING).ids]


def test_a_long_run_that_expands_is_refused() -> None:
    places = places_of(EXPANDING)
    with refused("text_too_long", 3642, 65539, 65536):
        list(groups(["a " * 20_000 + EIGHTEEN * 3641], places, expands=True))
    for accepted in (EIGHTEEN * 3640, "水" * 100_000, "…" + "a" * 100_000):
        whole_text, *_ = next(groups([accepted], places, expands=True))
        assert whole_text.content == accepted
    whole_text, *_ = next(groups([EIGHTEEN * 20_000], places))
    assert len(whole_text.content) == 20_000


def test_a_long_run_of_many_bytes_is_refused() -> None:
    spaces = TOKENIZER._vocabulary.boundary
    with refused("text_too_long", 250_002, 1_000_005, 1_000_000):
        list(groups(["a " + "🙂" * 250_001], spaces))
    for accepted in ("🙂" * 250_000, "a" * 1_000_000, "🙂" * 250_000 + " " + "🙂" * 249_999):
        parts = [piece.content for group in groups([accepted], spaces) for piece in group]
        assert "".join(parts) == accepted


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"BertPreTokenizer"', '"Whitespace"'),
        ('"BertNormalizer"', '"NFC"'),
        ('"content":"[MASK]"', '"content":"a b"'),
        ('"lstrip":false', '"lstrip":true'),
    ],
)
def test_other_tokenizers_are_not_divided(old: str, new: str) -> None:
    data = BUNDLE.file(BUNDLE.manifest.tokenizer.file).read_text()
    data = data.replace(": ", ":")
    assert old in data
    assert find_boundary(json.loads(data)) is not None
    assert find_boundary(json.loads(data.replace(old, new))) is None


def test_tokenizers_whose_tokens_may_cross_spaces_are_not_divided() -> None:
    for whole_text in (
        undivided(byte_level(), use_regex=False),
        undivided(unigram(splits_first=False), split=False),
    ):
        assert find_boundary(json.loads(whole_text.to_str())) is None
    places_of(undivided(unigram(splits_first=False), split=True))
