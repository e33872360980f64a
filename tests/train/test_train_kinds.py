"""Training with tokenizers that are not WordPiece: byte-level BPE and Unigram.

The oracle is the tokenizers library.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers

from cloze.export.measure.corpus import prepare_corpus
from cloze.export.measure.masking import Unit, continuations, make_masking
from cloze.export.measure.squad import Question, make_windows
from tests.support.tokenizer_kinds import byte_level, unigram
from tests.support.training import quietly

TEXT = "The captain found a coin by the cold river."


class Kind(NamedTuple):
    """A kind of tokenizer, with the mark of tokens that have a space before them."""

    tokenizer: Tokenizer
    mark: str


KINDS = {"byte-level": Kind(byte_level(), "Ġ"), "unigram": Kind(unigram(), "▁")}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def test_whole_words_are_those_between_spaces(kind: Kind) -> None:
    """A unit has the characters of one or more words between spaces, never a part of a word."""
    masking = make_masking(kind.tokenizer, 4, Unit.WHOLE_WORD)
    text = "The harbour was quiet, and the bank charges another fee in the evening."
    encoding = kind.tokenizer.encode(text)
    ids = np.array(encoding.ids)
    units = masking.units(ids)
    masked = [
        text[encoding.offsets[unit[0]][0] : encoding.offsets[unit[-1]][1]].strip() for unit in units
    ]
    assert masked == text.split()
    assert any(len(unit) > 1 for unit in units)
    vocabulary = kind.tokenizer.get_vocab()
    begins = ~continuations(kind.tokenizer)
    assert all(begins[n] for token, n in vocabulary.items() if token.startswith(kind.mark))


def test_a_text_without_spaces_is_not_one_word() -> None:
    tokenizer = unigram()
    tokenizer.add_tokens(["水", "火", "曜日"])
    continues = continuations(tokenizer)
    for token in ("水", "火", "曜日"):
        assert not continues[tokenizer.token_to_id(token)]


def test_sentences_have_the_tokens_of_their_text(kind: Kind, tmp_path: Path) -> None:
    """A text that is cut into sentences has the tokens of the whole text."""
    text = "The harbour was quiet. The bank charges a fee. It is small."
    (tmp_path / "text.txt").write_text(text)
    corpus = prepare_corpus(
        [tmp_path / "text.txt"], kind.tokenizer, tmp_path / "tokens", held_out=0.0, report=quietly
    ).train
    whole = kind.tokenizer.encode(
        f" {text}" if kind.mark == "Ġ" else text, add_special_tokens=False
    )
    assert corpus.tokens.tolist() == whole.ids
    assert len(corpus.sentences) == 4


@pytest.mark.parametrize("splits_first", [True, False])
@pytest.mark.parametrize("answer", ["bank", "ﬁnance", "Zürich", "für"])
def test_answers_are_characters_of_the_text(kind: Kind, answer: str, splits_first: bool) -> None:
    """The normaliser changes lengths: it decomposes, and removes what it decomposed."""
    tokenizer = Tokenizer.from_str(kind.tokenizer.to_str())
    if kind.mark == "▁":
        tokenizer = unigram(splits_first=splits_first)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents()])
    context = "In  Zu\u0308rich, the bank für ﬁnance is Zürich's."
    question = Question("1", "", "Which?", context, ((context.index(answer), answer),))
    windows = make_windows([question], tokenizer, tokens=64, stride=8, question_tokens=8)
    placed = [window for window in windows if window.start]
    assert placed
    for window in placed:
        first, last = window.offsets[window.start, 0], window.offsets[window.end, 1]
        assert context[first:last] == answer
        inside = window.offsets[window.offsets[:, 0] >= 0]
        assert not any(
            context[a:b] != context[a:b].strip() for a, b in inside if context[a:b].strip()
        )


def test_windows_have_the_pairs_of_the_tokenizer(kind: Kind) -> None:
    """A window that holds the whole paragraph is the pair that the post-processor makes."""
    question = Question("1", "", "Which bank?", TEXT, ())
    [window] = make_windows([question], kind.tokenizer, tokens=64, stride=8, question_tokens=20)
    expected = kind.tokenizer.encode("Which bank?", TEXT)
    assert window.input_ids.tolist() == expected.ids
    assert window.token_type_ids.tolist() == expected.type_ids
    rows = [n for n, part in enumerate(expected.sequence_ids) if part == 1]
    assert [n for n, (start, _) in enumerate(window.offsets) if start >= 0] == rows
    assert window.offsets[rows].tolist() == [list(expected.offsets[n]) for n in rows]
