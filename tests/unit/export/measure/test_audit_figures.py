"""The audit's figures on sentences: by hand, and by a direct computation with transformers."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM

from cloze.export.errors import DataError
from cloze.export.measure import audit as audits
from cloze.export.measure.audit import MINIMAL_PAIRS, AuditData, Figure, audit
from cloze.export.measure.audit_page import audit_page
from cloze.export.measure.scorer import Subject
from cloze.export.measure.stereotypes import (
    MaskedModel,
    SentencePair,
    Triple,
    differing,
    read_minimal_pairs,
    read_stereoset,
    stereoset_scores,
    text_scores,
)
from cloze.export.train.evaluate import open_subject
from cloze.model_store.store import Store
from tests import tiny

CPU = torch.device("cpu")
PAIRS = [SentencePair("he was old", "the red houses were old"), SentencePair("she", "he")]
TRIPLES = [
    Triple("he was walking home", "he was houses home", "he was Ünknöwn home"),
    Triple("the capital", "the red", "the walking"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"), "bert")


@pytest.fixture(scope="module")
def subject(folder: Path) -> Subject:
    return open_subject(str(folder), Store(Path()), CPU)


@torch.no_grad()
def probability(folder: Path, ids: list[int], position: int) -> float:
    """The probability of a token at a mask in its place."""
    model = BertForMaskedLM.from_pretrained(folder).eval()
    masked = torch.tensor([ids])
    masked[0, position] = AutoTokenizer.from_pretrained(folder).mask_token_id
    return float(model(input_ids=masked).logits[0, position].softmax(-1)[ids[position]])


def test_texts_score_as_in_transformers(folder: Path, subject: Subject) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    got = text_scores(PAIRS, MaskedModel(subject.scorer, subject.tokenizer, 32))
    for pair, scores in zip(PAIRS, got, strict=True):
        for text, score in zip((pair.more, pair.less), scores, strict=True):
            ids = tokenizer(text).input_ids
            expected = sum(np.log(probability(folder, ids, at)) for at in range(1, len(ids) - 1))
            assert score == pytest.approx(expected, abs=1e-3)


def test_a_word_scores_piece_by_piece_as_in_transformers(folder: Path, subject: Subject) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    got = stereoset_scores(TRIPLES, MaskedModel(subject.scorer, subject.tokenizer, 32))
    middles = [("he was ", ("walking", "houses", "Ünknöwn"), " home"),
               ("the ", ("capital", "red", "walking"), "")]  # fmt: skip
    longest = 0
    for (before, words, after), scores in zip(middles, got, strict=True):
        head = tokenizer(before).input_ids[:-1]
        tail = [*tokenizer(after, add_special_tokens=False).input_ids, tokenizer.sep_token_id]
        for word, score in zip(words, scores, strict=True):
            pieces = tokenizer(word, add_special_tokens=False).input_ids
            longest = max(longest, len(pieces))
            expected = np.mean(
                [
                    probability(folder, [*head, *pieces[: at + 1], *tail], len(head) + at)
                    for at in range(len(pieces))
                ]
            )
            assert score == pytest.approx(expected, rel=1e-3)
    assert longest > 1, "a word of several pieces is among them"


def test_the_words_that_texts_do_not_share() -> None:
    texts = ["a b c", "a x y c", "a  z c"]
    places = differing(texts)
    assert [text[start:end] for text, (start, end) in zip(texts, places, strict=True)] == [
        "b", "x y", "z",
    ]  # fmt: skip
    assert differing(["a a b", "a b"]) == [(2, 3), (0, 0)]


def test_icat_of_known_preferences() -> None:
    """Nadeem et al. 2021: an ideal model has 100, one without language or of one side 0."""

    def of(rows: list[list[float]]) -> dict[str, float]:
        data = AuditData(resamples=100)
        return {f.measure: f.value for f in audits._stereoset(np.array(rows), data)}

    ideal = of([[3, 2, 1], [2, 3, 1]])
    assert ideal == {
        "stereoset-stereotype": 0.5, "stereoset-language": 1.0, "stereoset-icat": 1.0,
    }  # fmt: skip
    assert of([[3, 2, 1], [3, 2, 1]])["stereoset-icat"] == 0
    # Three of four stereotypes are likelier, and six of eight words beat the meaningless one.
    mixed = of([[3, 2, 1], [3, 1, 2], [2, 3, 1], [3, 1, 2]])
    assert mixed["stereoset-language"] == 0.75
    assert mixed["stereoset-icat"] == pytest.approx(0.75 * 0.25 / 0.5)


def test_kinds_and_intervals() -> None:
    pairs = [SentencePair("a", "b", "gender")] * 12 + [SentencePair("a", "b", "age")] * 3
    scores = np.array([[1.0, 0.0]] * 12 + [[0.0, 1.0]] * 3)
    figures = list(audits._shares("crows-pairs", pairs, scores, AuditData()))
    assert [(f.group, f.value, f.count) for f in figures] == [("all", 0.8, 15), ("gender", 1, 12)]
    total, gender = figures
    assert total.low < 0.8 < total.high <= 1
    assert (gender.low, gender.high) == (1, 1)
    # The interval of a share of 15: the normal one is 0.598 to 1.002.
    assert total.low == pytest.approx(0.6, abs=0.07)


def figure(low: float, high: float, neutral: float | None = 0.5, p: float | None = None) -> Figure:
    return Figure("crows-pairs", "all", (low + high) / 2, low, high, neutral, 9, p)


def test_a_reading_asks_more_than_the_value() -> None:
    assert figure(0.51, 0.6).reading == "towards the stereotype"
    assert figure(0.4, 0.49).reading == "against the stereotype"
    assert figure(0.49, 0.7).reading == "no clear preference"
    assert figure(0.1, 0.7, 0.0, p=0.2).reading == "no clear preference"
    assert figure(0.1, 0.7, None).reading == "higher is better"


def test_a_model_is_audited_by_the_data_of_the_package(subject: Subject) -> None:
    figures = audit(subject, AuditData(resamples=100))
    by_measure = {each.measure for each in figures}
    assert by_measure == {"minimal-pairs", "weat", "seat"}
    assert sum(each.measure == "weat" for each in figures) == 8
    assert all(each.low <= each.high and np.isfinite(each.value) for each in figures)
    assert figures == audit(subject, AuditData(resamples=100))


def test_a_model_without_masks_and_embeddings_is_refused(subject: Subject) -> None:
    other = Subject(subject.scorer, subject.tokenizer, frozenset({"span"}), 32)
    with pytest.raises(DataError, match=r"needs a head for fill-mask or embeddings; .* has span"):
        audit(other, AuditData())


def test_the_pairs_of_the_package_differ_in_one_pronoun() -> None:
    pairs = read_minimal_pairs(MINIMAL_PAIRS)
    assert len(pairs) == 96
    pronouns = {frozenset({"he", "she"}), frozenset({"his", "her"}), frozenset({"him", "her"})}
    for pair in pairs:
        more, less = (re.findall(r"\w+", text) for text in (pair.more, pair.less))
        changed = [frozenset(both) for both in zip(more, less, strict=True) if len(set(both)) == 2]
        assert len(changed) == 1, pair
        assert changed[0] in pronouns, pair


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", "is not a JSON object: '\\[1\\]'"),
        ("{", "is not a JSON object: '{'"),
        (json.dumps({"stereotype": "a b", "anti_stereotype": 7}), "must be a sentence, got 7"),
        (json.dumps({"stereotype": "a b"}), "anti_stereotype must be a sentence, got None"),
        (json.dumps(dict.fromkeys(Triple.__slots__, "a b")), "differ in one place|both sentences"),
    ],
)
def test_a_wrong_row_names_file_line_and_value(tmp_path: Path, row: str, message: str) -> None:
    good = {"stereotype": "a [b]", "anti_stereotype": "a c", "unrelated": "a d", "type": 1}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(good)}\n\n{row}\n")
    for read in (read_minimal_pairs, read_stereoset):
        with pytest.raises(DataError, match=message) as caught:
            read(file)
        assert str(caught.value).startswith(f"{file}, line 3")
    file.write_text(f"{json.dumps(good)}\n")
    assert read_minimal_pairs(file) == [SentencePair("a b", "a c", "1")]
    file.write_text("\n")
    with pytest.raises(DataError, match="is empty"):
        read_stereoset(file)


def test_the_page_shows_every_figure_and_loads_nothing() -> None:
    page = audit_page("<my model>", [figure(0.51, 0.6), figure(0.1, 0.7, None)])
    assert "&lt;my model&gt;" in page
    assert "<my model>" not in page
    assert page.count("<circle") == 2
    assert "0.510 to 0.600" in page
    assert not re.search(r"https?://|src=|href=", page)
