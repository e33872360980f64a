"""Makes a model prefer stereotypes less, and says what this costs.

- Counterfactual data augmentation (Zmigrod et al. 2019): pre-training goes on with the text and a
  copy of it in which the words of two groups are exchanged.
- Sent-Debias (Liang et al. 2020): the directions in which the embeddings of sentences and of their
  exchanged copies differ are projected away. The projection is a dense layer of the checkpoint.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cloze.export.errors import Report, TrainError
from cloze.export.evaluation.audit import AuditData, audit
from cloze.export.evaluation.scorer import Subject, unit_embeddings
from cloze.export.heads.embedding_steps import Projection
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.model import TorchScorer
from cloze.export.train.card import CARD, common_license, front_matter
from cloze.export.train.documents import read_documents, split_sentences
from cloze.export.train.evaluate import EvaluationData, evaluate, open_subject
from cloze.export.train.pretrain import pretrain
from cloze.export.train.recipe import PretrainRecipe
from cloze.export.train.run_options import RunOptions
from cloze.export.train.save import save_checkpoint
from cloze.export.train.word_pairs import WordPairs, read_word_pairs, write_counterfactuals
from cloze.model_store.store import Store

COUNTERFACTUALS = "counterfactuals.jsonl"

_SENTENCES = 5000
"""Sentences with an exchanged word that a projection is computed from, at most."""

_FEWEST = 20
_TOKENS = 128


@dataclass(frozen=True, slots=True)
class DebiasFiles:
    """The files of a run.

    Attributes:
        word_pairs: two words per line.
        scored_pairs: pairs of STS-B's format to measure quality on.
    """

    text: list[Path]
    word_pairs: Path
    scored_pairs: list[Path]


@dataclass(frozen=True, slots=True)
class Change:
    """A figure of the audit or of quality, before and after."""

    figure: str
    before: float
    after: float


def augment(
    source: str, files: DebiasFiles, recipe: PretrainRecipe, options: RunOptions
) -> tuple[Path, list[Change]]:
    """Go on with the pre-training of a checkpoint, on text and its counterfactual copies.

    Quality is measured on the held-out part of the text, without the copies.

    Raises:
        TrainError: an input is missing or unsuitable, or the run fails.
        ExportError: the checkpoint cannot be loaded.
    """
    words = read_word_pairs(files.word_pairs)
    augmented = options.run_dir / COUNTERFACTUALS
    copies = write_counterfactuals(files.text, words, augmented)
    options.report(f"{copies:,} documents have a counterfactual copy")
    checkpoint = pretrain([augmented], recipe, options, source=source)
    quality = EvaluationData(files.text, files.scored_pairs, [], recipe.held_out, tokens=_TOKENS)
    before, after = (
        _measure(open_subject(name, Store(Path()), options.device), quality, options.report)
        for name in (source, str(checkpoint))
    )
    changes = _changes(before, after)
    _add_to_card(checkpoint, changes)
    return checkpoint, changes


def project(
    source: str,
    files: DebiasFiles,
    dimensions: int,
    folder: Path,
    device: torch.device,
    report: Report,
) -> list[Change]:
    """Write a copy of a checkpoint whose embeddings lack the directions of the word pairs.

    Args:
        dimensions: number of directions to remove.
        folder: folder of the new checkpoint.

    Raises:
        TrainError: too few sentences have a word of the pairs, or the embedding joins poolings.
        ExportError: the checkpoint cannot be loaded.
    """
    words = read_word_pairs(files.word_pairs)
    checkpoint = load_checkpoint(source)
    recipe, model = checkpoint.recipe, checkpoint.model.to(device)
    if recipe.further_poolings:
        raise TrainError(f"{source} joins several poolings, which cannot be written again")
    heads = frozenset(head.name for head in checkpoint.heads)
    subject = Subject(
        TorchScorer(model, device, recipe), checkpoint.tokenizer, heads, model.config.max_positions
    )
    sentences = list(islice(_sentences(files.text, words), _SENTENCES))
    size = recipe.dimensions(model.config.hidden_size)
    if len(sentences) < max(_FEWEST, dimensions) or dimensions >= size:
        raise TrainError(
            f"{dimensions} of {size} dimensions need at least {max(_FEWEST, dimensions)} sentences "
            f"with a word of the word pairs, and the text has {len(sentences)}"
        )
    directions = bias_directions(subject, sentences, words, dimensions)
    projection = Projection(torch.from_numpy(np.eye(size) - directions.T @ directions), None)
    debiased = replace(recipe, steps=(*recipe.steps, projection.to(device)))
    after = replace(subject, scorer=TorchScorer(model, device, debiased))
    quality = EvaluationData([], files.scored_pairs, [], 1.0)
    embeds = frozenset({"embedding"})
    changes = _changes(
        *(_measure(replace(each, heads=embeds), quality, report) for each in (subject, after))
    )
    save_checkpoint(model, checkpoint.tokenizer, folder, embedding=debiased)
    matter = front_matter(common_license([checkpoint]))
    title = f"{matter}# {source} without {dimensions} directions of word pairs\n"
    (folder / CARD).write_text(title, encoding="utf-8")
    _add_to_card(folder, changes)
    return changes


def _sentences(files: Sequence[Path], words: WordPairs) -> Iterator[str]:
    """Yield the sentences of the texts that have a word of the pairs."""
    for document in read_documents(files):
        for sentence in split_sentences(document.text):
            if words.exchange(sentence) != sentence:
                yield sentence


def bias_directions(
    subject: Subject, sentences: Sequence[str], words: WordPairs, dimensions: int
) -> NDArray[np.float64]:
    """Return the orthonormal directions [K, D] in which sentences and exchanged copies differ most.

    By principal components of the differences of unit vectors. A sentence and its copy lie
    opposite to each other around their mean, so the differences are not centred again.
    """
    exchanged = [words.exchange(sentence) for sentence in sentences]
    encoded = subject.tokenizer.tokenizer.encode_batch([*sentences, *exchanged])
    tokens = min(_TOKENS, subject.max_tokens)
    vectors = unit_embeddings(subject.scorer, [each.ids[:tokens] for each in encoded])
    differences = (vectors[: len(sentences)] - vectors[len(sentences) :]).astype(np.float64)
    _, _, directions = np.linalg.svd(differences, full_matrices=False)
    chosen: NDArray[np.float64] = directions[:dimensions]
    return chosen


def _measure(subject: Subject, quality: EvaluationData, report: Report) -> dict[str, float]:
    """Return the audit's figures with the data of the package, and those of quality."""
    figures = {f"{each.measure}, {each.group}": each.value for each in audit(subject, AuditData())}
    with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
        return figures | evaluate(subject, quality, Path(folder), report)


def _changes(before: dict[str, float], after: dict[str, float]) -> list[Change]:
    return [Change(name, before[name], after[name]) for name in before if name in after]


def _add_to_card(checkpoint: Path, changes: Sequence[Change]) -> None:
    """Add the table of both audits to the card of a checkpoint."""
    rows = "".join(
        f"| {change.figure} | {change.before:.4f} | {change.after:.4f} |\n" for change in changes
    )
    with (checkpoint / CARD).open("a", encoding="utf-8") as stream:
        stream.write(f"\n## Before and after\n\n| figure | before | after |\n|---|---|---|\n{rows}")
