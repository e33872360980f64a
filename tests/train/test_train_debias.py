"""Debiasing: exchanged words, a projection that sentence-transformers and a bundle compute, losses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from cloze.cli import cli
from cloze.export.errors import TrainError
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.measure.documents import is_held_out, read_documents
from cloze.export.train.debias import bias_directions, project
from cloze.export.train.word_pairs import WordPairs, read_word_pairs, write_counterfactuals
from tests.support import tiny
from tests.support.fine_tuning import exported

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("source"), "bert")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    places = ["the red house", "the old road", "the city", "the year", "the capital of france"]
    lines = [f"He was in {place} {n}. She saw {place} {n}." for n in range(8) for place in places]
    file.write_text("\n\n".join([*lines, "The house was red."]) + "\n")
    return file


def test_words_change_places_with_their_capitals() -> None:
    words = read_word_pairs()
    text = "He gave his mother HER book; the King thanked him, not there."
    assert words.exchange(text) == "She gave her father HIS book; the Queen thanked her, not there."
    assert WordPairs([("a", "b")]).exchange("A b ab") == "B a ab"


@pytest.mark.parametrize("row", ["he", "he\the", "he\tshe\tit", "he\tshe man"])
def test_a_wrong_pair_names_line_and_value(tmp_path: Path, row: str) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text(f"man\twoman\n{row}\n")
    with pytest.raises(TrainError, match=r"line 2: two different words.*got '") as caught:
        read_word_pairs(file)
    assert repr(row) in str(caught.value)
    file.write_text("\n")
    with pytest.raises(TrainError, match="holds no word pairs"):
        read_word_pairs(file)


def test_a_copy_is_on_the_side_of_its_original(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    words = read_word_pairs()
    assert write_counterfactuals([text], words, out) == 40
    documents = list(read_documents([out]))
    originals = list(read_documents([text]))
    assert len(documents) == 81
    held = {share: [is_held_out(each.key, share) for each in documents] for share in (0.2, 0.5)}
    for sides in held.values():
        assert sides[:80:2] == sides[1:80:2]
        assert len(set(sides)) == 2
    assert held[0.5][:80:2] == [is_held_out(each.key, 0.5) for each in originals[:40]]
    assert documents[1].text.startswith("She was in")
    with pytest.raises(TrainError, match="nothing would change"):
        write_counterfactuals([text], WordPairs([("x", "y")]), out)
    assert len(list(read_documents([out]))) == 81, "the old file is whole"
    monkeypatch.setattr("cloze.export.train.word_pairs.is_main", lambda: False)
    assert write_counterfactuals([text], words, tmp_path / "other.jsonl") == 0
    assert not (tmp_path / "other.jsonl").exists(), "the main process of a run writes"


@pytest.mark.parametrize("normalised", [False, True])
def test_the_directions_of_the_pairs_are_gone(
    source: Path, text: Path, tmp_path: Path, normalised: bool
) -> None:
    words = read_word_pairs()
    model = SentenceTransformer(str(source), device="cpu")
    if normalised:
        model.append(Normalize())
    model.save(str(tmp_path / "source"))
    project(str(tmp_path / "source"), [text], words, 1, tmp_path / "out", CPU)

    texts = [line for line in text.read_text().splitlines() if line]
    parts = [part for line in texts[:-1] for part in line.replace(". S", ".\nS").splitlines()]
    (direction,) = bias_directions(model, parts, words, 1)
    sentences = ["he was red .", "the man saw the house .", "his city was old ."]
    plain, projected = (exported(each, tmp_path, sentences) for each in (source, tmp_path / "out"))
    expected = plain - np.outer(plain @ direction, direction)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(plain @ direction).max() > 0.01
    assert projected == pytest.approx(expected, abs=1e-5)
    loaded = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    theirs = loaded.encode(sentences)
    assert (np.linalg.norm(theirs, axis=1) == pytest.approx(1)) == normalised
    assert loaded.encode(sentences, normalize_embeddings=True) == pytest.approx(expected, abs=1e-5)


def test_the_principal_direction_is_that_of_most_difference(source: Path, tmp_path: Path) -> None:
    """Two directions hold the two largest eigenvalues of the differences; few sentences have none."""
    one_sentence = tmp_path / "text.txt"
    one_sentence.write_text("He was red.\n")
    model = SentenceTransformer(str(source), device="cpu")
    sentences = [f"he was {word} ." for word in ("red", "old", "the", "capital", "year")]
    directions = bias_directions(model, sentences, read_word_pairs(), 2)
    assert directions @ directions.T == pytest.approx(np.eye(2), abs=1e-6)
    swapped = [text.replace("he", "she", 1) for text in sentences]
    differences = np.subtract(*(exported(source, tmp_path, each) for each in (sentences, swapped)))
    captured = ((differences @ directions.T) ** 2).sum(0)
    largest = np.linalg.eigvalsh(differences.T @ differences)[:-3:-1]
    assert captured == pytest.approx(largest, rel=1e-4)
    with pytest.raises(TrainError, match=r"need at least 20 sentences .* the text has 1"):
        project(str(source), [one_sentence], read_word_pairs(), 1, tmp_path / "out", CPU)
    assert not (tmp_path / "out").exists()


RECIPE = """
held_out = 0.2
pretraining = {sentence = "none"}
optimisation = {learning_rate = 3e-3, precision = "fp32"}
phases = [{tokens = 24, sequences = 16, steps = 40}]
"""


def run(*arguments: object) -> str:
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_training_goes_on_with_the_copies(source: Path, text: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    options = ("--corpus", text, "--recipe", recipe, "--device", "cpu")
    run("train", "debias", source, *options, "--out", tmp_path / "run")
    checkpoint, key = tmp_path / "run" / "checkpoint", "fill_mask_whole_word_perplexity"
    held_out = ("--corpus", text, "--held-out", 0.2, "--json", "--device", "cpu")
    before, after = (
        json.loads(run("train", "evaluate", each, *held_out)) for each in (source, checkpoint)
    )
    assert after[key] < before[key]
    assert "| data | counterfactuals.jsonl |" in (checkpoint / "README.md").read_text()
    assert load_checkpoint(str(checkpoint)).model.masked_lm is not None


def test_a_projection_is_exported(source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--corpus", text, "--device", "cpu")
    assert run("train", "debias-embed", source, *options, "--out", out).splitlines()[-1] == str(out)
    run("export", out, "--name", "debiased", "--model-store", tmp_path)
    texts = ["he was red .", "the city"]
    bundle, checkpoint = (exported(each, tmp_path, texts) for each in ("bundle:debiased", out))
    assert bundle == pytest.approx(checkpoint, abs=1e-5)
