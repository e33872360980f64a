"""From text to batches: sentences, the split, masking and pairs have the papers' statistics."""

import json
import lzma
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, BertTokenizerFast

from cloze.export.measure.corpus import Corpus, PreparedCorpus, prepare_corpus
from cloze.export.measure.documents import is_held_out, read_documents, split_sentences
from cloze.export.measure.examples import (
    IS_NEXT,
    UNPAIRED,
    EpochExamples,
    ExampleOptions,
    SentenceObjective,
)
from cloze.export.measure.masking import Masking, Unit, choose_spans
from cloze.export.train.batches import TextBatches, shuffled_batches
from cloze.export.train.folder import Folder, open_folder
from cloze.export.train.kept_embeddings import unmasked_texts
from cloze.export.train.objectives import runs
from cloze.export.train.recipe import Phase, Pretraining, TextRecipe
from cloze.export.train.vocabulary import SPECIAL_TOKENS, save_vocabulary, train_tokenizer
from tests.support.training import STORIES, quietly, write_stories


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    folder = tmp_path_factory.mktemp("vocabulary") / "tokens"
    save_vocabulary(train_tokenizer(lambda: STORIES, size=130, lowercase=True), folder)
    return open_folder(str(folder))


@pytest.fixture(scope="module")
def corpus(vocabulary: Folder, tmp_path_factory: pytest.TempPathFactory) -> PreparedCorpus:
    folder = tmp_path_factory.mktemp("corpus")
    return prepared(write_stories(folder / "stories.txt"), vocabulary, folder / "prepared")


def prepared(text: Path, vocabulary: Folder, folder: Path, report: Any = quietly) -> PreparedCorpus:
    return prepare_corpus([text], vocabulary.text, folder, held_out=0.2, report=report)


def test_sentences_keep_their_order_and_lose_nothing() -> None:
    text = 'He said "Go." Then Mr. Smith left. A. B. Jones came (late). "Oh?" 3 men sat.\nA new line. e.g. this'
    assert "|".join(split_sentences(text)) == (
        'He said "Go."|Then Mr. Smith left.|A. B. Jones came (late).|"Oh?"|3 men sat.|'
        "A new line. e.g. this"
    )


@given(st.text(alphabet="aB.!? \n\"'", max_size=60))
def test_sentences_hold_every_character_but_white_space(text: str) -> None:
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


def test_documents_of_every_form_are_the_same(tmp_path: Path) -> None:
    lines = [json.dumps({"title": story.title, "text": story.text}) for story in STORIES[:3]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    with lzma.open(tmp_path / "b.jsonl.xz", "wt") as stream:
        stream.write("\n".join(lines))
    write_stories(tmp_path / "c.txt")
    jsonl, compressed, plain = (
        list(read_documents([tmp_path / name])) for name in ("a.jsonl", "b.jsonl.xz", "c.txt")
    )
    assert jsonl == compressed == STORIES[:3]
    assert [document.text.rstrip("\n") for document in plain] == [story.text for story in STORIES]


def test_tokens_are_the_texts(vocabulary: Folder, corpus: PreparedCorpus, tmp_path: Path) -> None:
    """Each document's tokens, sentence by sentence, in order, in one part or the other."""
    parts = {True: iter(_documents(corpus.held_out)), False: iter(_documents(corpus.train))}
    for story in read_documents([write_stories(tmp_path / "stories.txt")]):
        expected = [
            vocabulary.text.encode(text, add_special_tokens=False).ids
            for text in split_sentences(story.text)
        ]
        assert next(parts[is_held_out(story.key, 0.2)]) == expected
    assert not list(parts[True])
    assert not list(parts[False])


def test_a_text_of_one_title_is_split_by_paragraphs(vocabulary: Folder, tmp_path: Path) -> None:
    """A run of neighbours on one side is a document, and a single paragraph is never held out."""
    flat = [story.text.replace("\n", " ") for story in STORIES]
    paragraphs = [f"{text} The owl saw it {'again ' * n}." for n, text in enumerate(flat)]
    book = tmp_path / "book.jsonl"
    line = next(text for n in range(99) if is_held_out(text := f"The owl saw {n}.", 0.2))
    rows = [{"title": "One book", "text": "\n".join(paragraphs)}, {"title": "A line", "text": line}]
    book.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said: list[str] = []
    corpus = prepared(book, vocabulary, tmp_path / "prepared", said.append)
    assert any("split by paragraphs" in line for line in said)
    for part, is_out in ((corpus.held_out, True), (corpus.train, False)):
        sides = groupby(paragraphs, lambda each: is_held_out(each, 0.2))
        runs = [list(run) for side, run in sides if side == is_out] + [[line]] * (not is_out)
        texts = [text for run in runs for text in run]
        expected = [vocabulary.text.encode(text, add_special_tokens=False).ids for text in texts]
        assert part.tokens.tolist() == [*chain(*expected)] != []
        assert part.document_count == len(runs)


def _documents(part):
    for first, end in pairwise(part.documents):
        starts = part.sentences[first : end + 1]
        yield [part.tokens[a:b].tolist() for a, b in pairwise(starts)]


@given(st.text(min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_holds_out_a_superset(title: str, one: float, other: float) -> None:
    smaller, larger = sorted([one, other])
    assert is_held_out(title, larger) or not is_held_out(title, smaller)


def test_the_split_goes_by_titles_in_any_spelling() -> None:
    titles = [f"Title {number}" for number in range(4000)]
    share = np.mean([is_held_out(title, 0.1) for title in titles])
    assert 0.08 < share < 0.12
    for title in titles:
        other = title.upper().replace(" ", "_")
        assert is_held_out(title, 0.1) == is_held_out(other, 0.1)


def test_the_vocabulary_is_read_alike_by_transformers(vocabulary: Folder) -> None:
    tokens = sorted(vocabulary.text.get_vocab().items(), key=lambda item: item[1])
    assert [token for token, _ in tokens[:5]] == list(SPECIAL_TOKENS)
    theirs = BertTokenizerFast(vocab=dict(tokens), do_lower_case=True)
    read = AutoTokenizer.from_pretrained(vocabulary.path)
    for story in STORIES[:5]:
        given = (story.text, "A second text.")
        assert theirs(*given).input_ids == vocabulary.text.encode(*given).ids
        assert read(*given).token_type_ids == vocabulary.text.encode(*given).type_ids


def test_a_vocabulary_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Here many characters are equally common, and a hash map's seed would order them."""
    rare = " ".join(chr(0x100 + number) + chr(0x400 + number % 60) for number in range(150))
    (tmp_path / "text.txt").write_text("\n\n".join([rare, *(story.text for story in STORIES)]))
    command = [sys.executable, "-m", "cloze", "train", "vocab", "--corpus", tmp_path / "text.txt"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/notes.txt").write_text("mine")
    for name in "ab":
        subprocess.run([*command, "--size", "180", "--out", tmp_path / name], check=True)
    first, other = ((tmp_path / name / "tokenizer.json").read_text() for name in "ab")
    assert other == first
    assert (tmp_path / "a/notes.txt").read_text() == "mine", "other files of the folder stay"
    specials = [token["content"] for token in json.loads(first)["added_tokens"]]
    assert specials == list(SPECIAL_TOKENS)


def test_a_cased_vocabulary_keeps_case() -> None:
    cased = train_tokenizer(lambda: STORIES, size=140, lowercase=False)
    assert "The" in cased.get_vocab()
    assert cased.encode("The") != cased.encode("the")


V = 50
CONTINUES = np.arange(V) % 3 == 2
SPECIAL = np.arange(V) < 5
MASK_ID = 4

ids = st.lists(st.integers(5, V - 1), min_size=1, max_size=60)


def mask(unit: Unit, input_ids: np.ndarray, rng: Any, rate: float = 0.15) -> Any:
    return Masking(unit, MASK_ID, SPECIAL, CONTINUES)(input_ids, rate, rng)


@settings(deadline=None)
@given(ids, st.sampled_from(list(Unit)), st.floats(0.05, 0.6), st.integers(0, 2**32))
def test_masking_changes_only_what_it_chose(
    middle: list[int], unit: Unit, rate: float, seed: int
) -> None:
    input_ids = np.array([2, *middle, 3], np.int64)
    masked, positions = mask(unit, input_ids, np.random.default_rng(seed), rate)
    assert len(positions) >= 1
    assert (np.diff(positions) > 0).all()
    assert not SPECIAL[input_ids[positions]].any()
    untouched = np.setdiff1d(np.arange(len(input_ids)), positions)
    np.testing.assert_array_equal(masked[untouched], input_ids[untouched])
    assert not SPECIAL[masked[1:-1][masked[1:-1] != MASK_ID]].any()
    around = zip(*(each.tolist() for each in runs(torch.from_numpy(positions))), strict=True)
    for position, (first, last) in zip(positions, around, strict=True):
        assert first <= position <= last
        assert set(range(first, last + 1)) <= set(positions)
        assert not {first - 1, last + 1} & set(positions)
    if unit != Unit.TOKEN:  # words are masked whole
        for position in range(2, len(input_ids) - 1):
            if CONTINUES[input_ids[position]]:
                assert (position in positions) == (position - 1 in positions)


@pytest.mark.parametrize("unit", list(Unit))
def test_masking_has_the_papers_shares(unit: Unit) -> None:
    """15 % chosen; of those 80 % [MASK], 10 % random, 10 % as they were."""
    rng = np.random.default_rng(0)
    chosen, kinds, total = 0, np.zeros(3), 0
    for _ in range(2000):
        input_ids = np.array([2, *rng.integers(5, V, 100), 3])
        masked, positions = mask(unit, input_ids, rng)
        seen, labels = masked[positions], input_ids[positions]
        chosen, total = chosen + len(seen), total + 100
        is_mask, is_same = seen == MASK_ID, seen == labels
        kinds += [is_mask.sum(), (~is_mask & ~is_same).sum(), is_same.sum()]
    # A span may exceed what is left of the 15 % only if it is the first; a word likewise.
    assert chosen / total == pytest.approx(0.15, abs=0.008)
    random_hits = 0.1 / (V - 5)  # a random token may be the right one
    expected = [0.8, 0.1 - random_hits, 0.1 + random_hits]
    np.testing.assert_allclose(kinds / chosen, expected, atol=0.01)


def test_span_lengths_are_geometric_and_at_most_10_words() -> None:
    rng = np.random.default_rng(0)
    lengths = []
    for _ in range(3000):
        chosen = choose_spans(list(np.arange(1, 401)[:, None]), 60, rng)
        # The last ones are cut to what is left of the 15 %.
        lengths += [len(span) for span in chosen[:3]]
    shares = np.bincount(lengths, minlength=11) / len(lengths)
    expected = 0.8 ** np.arange(10) / (0.8 ** np.arange(10)).sum()
    np.testing.assert_allclose(shares[1:11], expected, atol=0.03)


def sequences(
    corpus: PreparedCorpus, vocabulary: Folder, sentence: SentenceObjective, **more: Any
) -> EpochExamples:
    settings = {"length": 40, "seed": 3, "epoch": 0} | more
    options = ExampleOptions(sentence=sentence, special=vocabulary.special, **settings)
    return EpochExamples(corpus.train, options)


def split(sequence, vocabulary: Folder) -> tuple[list[int], list[int]]:
    input_ids, types = sequence.input_ids, sequence.token_type_ids
    assert input_ids[0] == vocabulary.text.token_to_id("[CLS]")
    first, second = input_ids[types == 0][1:], input_ids[types == 1]
    assert first[-1] == second[-1] == vocabulary.text.token_to_id("[SEP]")
    return first[:-1].tolist(), second[:-1].tolist()


def _contains(tokens: list[int], piece: list[int]) -> bool:
    text, part = (",".join(map(str, numbers)) for numbers in (tokens, piece))
    return f",{part}," in f",{text},"


@pytest.mark.parametrize("sentence", [SentenceObjective.NSP, SentenceObjective.SOP])
def test_pairs_are_what_they_claim(
    vocabulary: Folder, corpus: PreparedCorpus, sentence: SentenceObjective
) -> None:
    """In half of the pairs, the second text is of another document, or both are swapped."""
    source = sequences(corpus, vocabulary, sentence)
    documents = [[*chain(*document)] for document in _documents(corpus.train)]
    labels = []
    for number in range(len(source)):
        sequence = source.make(number, source.rng(number))
        first, second = split(sequence, vocabulary)
        assert first
        assert second
        assert len(sequence.input_ids) <= 40
        if sequence.label == IS_NEXT:
            assert any(_contains(tokens, first + second) for tokens in documents)
        elif sentence == SentenceObjective.SOP:
            assert any(_contains(tokens, second + first) for tokens in documents)
        else:
            homes = {n for n, tokens in enumerate(documents) if _contains(tokens, first)}
            others = {n for n, tokens in enumerate(documents) if _contains(tokens, second)}
            assert homes
            assert others
            assert len(homes | others) > 1
        labels.append(sequence.label)
    assert 0.4 < np.mean(labels) < 0.6


def places(corpus: Corpus, ids: np.ndarray) -> list[int]:
    """Return where a corpus has these tokens one after the other."""
    windows = np.lib.stride_tricks.sliding_window_view(corpus.tokens, len(ids))
    return np.flatnonzero((windows == ids).all(1)).tolist()


def test_single_texts_hold_the_whole_corpus(vocabulary: Folder, corpus: PreparedCorpus) -> None:
    source = sequences(corpus, vocabulary, SentenceObjective.NONE)
    seen, unique = np.zeros(len(corpus.train.tokens), bool), []
    for number in range(len(source)):
        piece = source.make(number, source.rng(number)).input_ids[1:-1]
        found = places(corpus.train, piece)
        assert found
        unique.append(len(found) == 1)
        for at in found:
            seen[at : at + len(piece)] = True
    assert seen.all()
    assert np.mean(unique) > 0.7
    sequence = source.make(0, source.rng(0))
    assert sequence.label is None
    assert not sequence.token_type_ids.any()


def test_epochs_differ_and_a_seed_is_one_epoch(vocabulary: Folder, corpus: PreparedCorpus) -> None:
    def first(**more: int) -> list[list[int]]:
        source = sequences(corpus, vocabulary, SentenceObjective.NSP, **more)
        return [source.make(n, source.rng(n)).input_ids.tolist() for n in range(20)]

    assert first() == first()
    assert first() != first(epoch=1)
    assert first() != first(seed=4)


MakeBatches = Callable[..., TextBatches]


@pytest.fixture
def text_batches(corpus: PreparedCorpus, vocabulary: Folder) -> MakeBatches:
    def make(*phases: Phase, **pretraining: Any) -> TextBatches:
        plan = TextRecipe(pretraining=Pretraining(**pretraining), phases=[*phases], seed=1)
        return TextBatches(corpus.train, plan, vocabulary)

    return make


def test_the_mask_rate_falls_in_a_straight_line(text_batches: MakeBatches) -> None:
    phases = (Phase(tokens=40, sequences=64, steps=steps) for steps in (51, 50))
    batches = text_batches(*phases, rate=0.3, final_rate=0.15)
    for step, rate in ((0, 0.3), (50, 0.225), (100, 0.15)):
        batch = batches(step, 0)
        ordinary = batch.tokens - 3 * len(batch.input_ids)
        assert len(batch.positions) / ordinary == pytest.approx(rate, abs=0.012)


@pytest.mark.parametrize("sentence", [SentenceObjective.NSP, SentenceObjective.NONE])
@pytest.mark.parametrize("length", [8, 40])
def test_embeddings_are_of_the_unmasked_first_texts(
    vocabulary: Folder,
    corpus: PreparedCorpus,
    text_batches: MakeBatches,
    sentence: Any,
    length: int,
) -> None:
    phase = Phase(tokens=40, sequences=32, steps=3)
    batches = text_batches(phase, sentence=sentence, rate=0.5)
    source = sequences(corpus, vocabulary, sentence, seed=1)
    input_ids, mask = unmasked_texts(batches(0, 0), tokens=160, length=length)
    assert input_ids.shape == (160 // length, length)
    for row, (ids, real) in enumerate(zip(input_ids, mask, strict=True)):
        sequence = source.make(row, source.rng(row))
        first = sequence.input_ids[sequence.token_type_ids == 0].tolist()
        cut = first if len(first) <= length else [*first[: length - 1], first[-1]]
        assert ids[real].tolist() == cut
        assert first[-1] == vocabulary.text.token_to_id("[SEP]")


def test_any_batch_can_be_asked_for_at_any_time(text_batches: MakeBatches) -> None:
    """Each phase has its lengths, and its share of single sentences."""
    first = Phase(tokens=24, sequences=16, steps=40, single=0.9)
    second = Phase(tokens=40, sequences=8, steps=40)
    straight, jumping = (text_batches(first, second) for _ in range(2))
    in_order = [straight(step, 0) for step in range(80)]
    for step in (79, 3, 41, 40, 39, 0):
        other = jumping(step, 0)
        assert (other.input_ids == in_order[step].input_ids).all()
        assert (other.positions == in_order[step].positions).all()
    assert in_order[0].input_ids.shape == (16, 24)
    assert in_order[40].input_ids.shape == (8, 40)
    labels = [batch.next_labels for batch in in_order]
    assert 0.8 < (np.concatenate(labels[:40]) == UNPAIRED).mean() < 1
    assert not (np.concatenate(labels[40:]) == UNPAIRED).any()


def are_of_a_sentence(corpus: Corpus, ids: np.ndarray) -> bool:
    """Return whether some sentence of a corpus has these tokens one after the other."""
    starts = set(corpus.sentences.tolist())
    return any(not starts & {*range(at + 1, at + len(ids))} for at in places(corpus, ids))


def test_a_share_of_examples_is_one_sentence(vocabulary: Folder, corpus: PreparedCorpus) -> None:
    examples = sequences(corpus, vocabulary, SentenceObjective.NSP, single=0.5)
    made = [examples.make(number, examples.rng(number)) for number in range(len(examples))]
    single = [example for example in made if example.label == UNPAIRED]
    assert 0.4 < len(single) / len(made) < 0.6
    separator = vocabulary.text.token_to_id("[SEP]")
    for example in made:
        is_single = example.label == UNPAIRED
        assert (example.input_ids == separator).sum() == (1 if is_single else 2)
        if is_single:
            assert not example.token_type_ids.any()
            assert are_of_a_sentence(corpus.train, example.input_ids[1:-1])


@pytest.mark.parametrize("dynamic", [True, False])
def test_static_masking_repeats(text_batches: MakeBatches, dynamic: bool) -> None:
    batches = text_batches(Phase(tokens=40, sequences=1, steps=10_000), dynamic=dynamic)
    (epoch,) = batches.epoch_lengths
    same = [torch.equal(*(batches(at, 0).input_ids for at in (n, n + epoch))) for n in range(30)]
    assert all(same) if not dynamic else not any(same)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1), st.integers(1, 33), st.integers(0, 99))
def test_batches_hold_every_example_once_an_epoch(lengths: list[int], size: int, seed: int) -> None:
    batch = shuffled_batches(lengths, size, seed)
    count = -(-len(lengths) // size)
    for epoch in range(2):
        numbers = [index for n in range(count) for index in batch(epoch * count + n)]
        assert set(numbers) == set(range(len(lengths)))
        assert len(numbers) == count * size
