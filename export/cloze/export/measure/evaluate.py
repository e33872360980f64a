"""Measures a checkpoint or a bundle on text, scored pairs, questions, labels and tags."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cloze.export.errors import DataError, Report, TrainError
from cloze.export.graph.session import open_session
from cloze.export.heads import EMBEDDING, MASKED_LM, NEXT_SENTENCE, SPAN
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.measure import examples, labelled
from cloze.export.measure.corpus import Corpus, prepare_corpus
from cloze.export.measure.documents import is_held_out, read_lines
from cloze.export.measure.masking import Unit, make_masking
from cloze.export.measure.metrics import best_threshold, squad_answers
from cloze.export.measure.pairs import read_pairs, similarity
from cloze.export.measure.scorer import (
    GraphScorer,
    MaskedRow,
    Scorer,
    Subject,
    row_arrays,
    score_masks,
)
from cloze.export.measure.squad import answers_of, best_guesses, make_windows, read_questions
from cloze.export.model import TorchScorer
from cloze.model_store.heads import HEADS, sequence_classification, span, token_classification
from cloze.model_store.heads.label_sets import LabelSet, LabelSets
from cloze.model_store.heads.sequence_classification import SequenceLabelSet
from cloze.model_store.heads.token_classification import as_iob2
from cloze.model_store.manifest import Precision
from cloze.model_store.store import Bundle, Store

CLASSES = sequence_classification.HEAD.name
TAGS = token_classification.HEAD.name

_TOP = 5
_MASKED = 0.15
_PAIR_TOKENS = 128
_WINDOW_TOKENS = 384


def open_subject(
    source: str, store: Store, device: torch.device, precision: Precision = Precision.FP32
) -> Subject:
    """Open a checkpoint or a bundle.

    Args:
        source: folder or hub id of a checkpoint, or ``bundle:NAME[@VERSION]``.

    Raises:
        ExportError: the checkpoint cannot be loaded.
        StoreError: the bundle cannot be opened.
        TrainError: the bundle has no graph of this precision.
    """
    if source.startswith("bundle:"):
        return _open_bundle(source.removeprefix("bundle:"), store, precision)
    checkpoint = load_checkpoint(source)
    scorer = TorchScorer(checkpoint.model.to(device), device, checkpoint.recipe)
    positions = checkpoint.model.config.max_positions
    heads = frozenset(head.name for head in checkpoint.heads)
    return Subject(scorer, checkpoint.tokenizer, heads, positions, checkpoint.options)


def _open_bundle(reference: str, store: Store, precision: Precision) -> Subject:
    bundle = store.open(reference)
    manifest = bundle.manifest
    graph = manifest.graph_of(precision)
    if graph is None:
        raise TrainError(f"bundle {manifest.reference} has no {precision} graph")
    spec = manifest.graph_spec(graph.layout)
    session = open_session(bundle.file(graph.file), graph.layout)
    return Subject(
        GraphScorer(session, spec),
        _bundle_tokenizer(bundle),
        frozenset(spec.heads),
        manifest.limits.max_tokens,
        manifest.heads,
    )


def _bundle_tokenizer(bundle: Bundle) -> CheckpointTokenizer:
    """Open the tokenizer of a bundle, whose manifest names the special tokens."""
    spec = bundle.manifest.tokenizer
    tokenizer = Tokenizer.from_file(str(bundle.file(spec.file)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    names = {"mask_token": spec.mask_token} if spec.mask_token else {}
    return CheckpointTokenizer(tokenizer, False, bundle.manifest.special_tokens, names)


@dataclass(frozen=True, slots=True)
class EvaluationData:
    """The data to measure on.

    Text and questions are split by title as in training. All pairs are used.

    Attributes:
        held_out: share of titles that training held out; 1: all titles are used.
        sequences: number of masked sequences, and number of pairs of texts.
        labelled: files of texts with labels; all texts are used.
        tagged: files of sentences with tags; all sentences are used.
        label_set: the label set to measure; None: the first that has all labels of a file.
    """

    text: list[Path]
    pairs: list[Path]
    questions: list[Path]
    held_out: float
    sentences: tuple[Path, ...] = ()
    sequences: int = 1000
    tokens: int = 128
    seed: int = 1
    labelled: tuple[Path, ...] = ()
    tagged: tuple[Path, ...] = ()
    label_set: str | None = None


def evaluate(
    subject: Subject, data: EvaluationData, folder: Path, report: Report
) -> dict[str, float]:
    """Return every figure that the subject's heads and the data allow.

    Shares are in [0, 1]; exact match and F1 are in percent. The figures of a file have its name,
    or its path where two files have one name. The tokenized text is written to ``folder``.

    Raises:
        TrainError: a file cannot be read, or holds nothing to measure.
    """
    figures: dict[str, float] = {}
    if data.text and subject.heads & {MASKED_LM, NEXT_SENTENCE}:
        figures |= _measure_text(subject, data, folder, report)
    if data.pairs and EMBEDDING in subject.heads:
        max_tokens = min(_PAIR_TOKENS, subject.max_tokens)
        figures["sts_spearman"] = similarity(
            read_pairs(data.pairs), subject.tokenizer.tokenizer, subject.scorer, max_tokens
        )
    if data.questions and SPAN in subject.heads:
        figures |= _measure_questions(subject, data)
    names = _names([*data.sentences, *data.labelled, *data.tagged])
    if MASKED_LM in subject.heads:
        for file in data.sentences:
            figures |= _measure_sentences(subject, file, names[file].replace("-", "_"), report)
    for head, files in ((CLASSES, data.labelled), (TAGS, data.tagged)):
        for file in files if head in subject.heads else ():
            own = _measure_rows(subject, head, file, data.label_set)
            figures |= {f"{names[file]}_{name}": value for name, value in own.items()}
    return figures


def _names(files: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each file in figures: without endings, or the path if names are equal."""
    short = [file.name.partition(".")[0] for file in files]
    return {
        file: name if short.count(name) == 1 else str(file)
        for file, name in zip(files, short, strict=True)
    }


def _measure_rows(subject: Subject, head: str, file: Path, name: str | None) -> dict[str, float]:
    """Measure a label set on texts with labels, or on sentences with tags."""
    rows: list[Any] = (
        labelled.read_labelled([file]) if head == CLASSES else labelled.read_tagged([file])
    )
    labels, columns = _label_set(subject, head, rows, name)
    problem = labels.problem_type if isinstance(labels, SequenceLabelSet) else None
    if problem and problem != rows[0].problem:
        raise DataError(f"{rows[0].at} is {rows[0].kind}, the model is for {problem}")
    if problem != "regression":
        labelled.check_labels(rows, labels.labels if problem else _types(labels))
    encoded = labelled.encode_rows(rows, subject.tokenizer.tokenizer, subject.max_tokens)
    inputs = [(row.input_ids, row.token_type_ids) for row in encoded]
    logits = [each[..., columns] for each in row_arrays(subject.scorer, head, inputs)]
    if isinstance(labels, SequenceLabelSet):
        return labelled.measure_labels(rows, logits, labels)
    return labelled.measure_tags(rows, encoded, logits, labels)


def _types(labels: LabelSet) -> set[str]:
    """Return the labels, or the types of entities of tags."""
    tags = as_iob2(labels.labels, labels.labels)
    return {tag[2:] if tag.startswith(("B-", "I-")) else tag for tag in tags}


def _label_set(
    subject: Subject, head: str, rows: Sequence[labelled.Row], name: str | None
) -> tuple[LabelSet, slice]:
    """Return the named label set, or the first that has all labels of the rows, or the default."""
    options = subject.options[head]
    assert isinstance(options, LabelSets)
    if name is not None and name not in options.names:
        known = ", ".join(filter(None, options.names)) or "none"
        raise TrainError(f"the model has no label set {name!r} for {HEADS[head].task} ({known})")
    used = {label for row in rows for label in row.names}
    fitting = [each.name for each in options.sets if used <= _types(each)]
    return options.choose(name or next(iter(fitting), None))


def _measure_text(
    subject: Subject, data: EvaluationData, folder: Path, report: Report
) -> dict[str, float]:
    """Measure fill-mask and next sentence on the held-out text."""
    corpus = prepare_corpus(
        data.text,
        subject.tokenizer.tokenizer,
        folder,
        held_out=data.held_out,
        only_held_out=True,
        report=report,
    ).held_out
    figures: dict[str, float] = {}
    if MASKED_LM in subject.heads:
        for unit in (Unit.TOKEN, Unit.WHOLE_WORD):
            prefix = f"fill_mask_{unit.replace('-', '_')}"
            for name, value in _measure_masks(subject, corpus, unit, data).items():
                figures[f"{prefix}_{name}"] = value
    if NEXT_SENTENCE in subject.heads:
        texts = _examples(subject, corpus, examples.SentenceObjective.NSP, data)
        pairs = [example for example, _ in texts]
        figures["nsp_accuracy"] = _next_sentence_accuracy(subject, pairs)
        pairs = _pairs_of_sentences(subject, corpus, data)
        figures["nsp_accuracy_two_sentences"] = _next_sentence_accuracy(subject, pairs)
    return figures


def _examples(
    subject: Subject, corpus: Corpus, sentence: examples.SentenceObjective, data: EvaluationData
) -> Iterator[tuple[examples.TrainingExample, np.random.Generator]]:
    """Yield sequences, or pairs of texts, as in training, each with its generator."""
    options = examples.ExampleOptions(
        length=min(data.tokens, subject.max_tokens),
        sentence=sentence,
        special=subject.tokenizer.special,
        seed=data.seed,
        epoch=0,
        short=0.0,
    )
    epoch = examples.EpochExamples(corpus, options)
    for number in range(min(data.sequences, len(epoch))):
        rng = epoch.rng(number)
        yield epoch.make(number, rng), rng


def _measure_masks(
    subject: Subject, corpus: Corpus, unit: Unit, data: EvaluationData
) -> dict[str, float]:
    """Return the accuracy and the perplexity on masked tokens."""
    tokenizer = subject.tokenizer  # every chosen token becomes [MASK], as in a client's text
    masking = make_masking(tokenizer.tokenizer, tokenizer.mask_id, unit, replace=(1.0, 0.0))
    rows = []
    for example, rng in _examples(subject, corpus, examples.SentenceObjective.NONE, data):
        masked_ids, positions = masking(example.input_ids, _MASKED, rng)
        if len(positions):
            labels = example.input_ids[positions]
            rows.append(MaskedRow(masked_ids, example.token_type_ids, positions, labels))
    if not rows:
        raise TrainError("there is no held-out text to measure on")
    best, log_probabilities = zip(*score_masks(subject.scorer, rows, k=_TOP), strict=True)
    hits = np.concatenate(best) == np.concatenate([row.labels for row in rows])[:, None]
    return {
        "top1": float(hits[:, 0].mean()),
        "top5": float(hits.any(1).mean()),
        "perplexity": math.exp(-np.concatenate(log_probabilities).mean(dtype=np.float64)),
    }


def _pairs_of_sentences(
    subject: Subject, corpus: Corpus, data: EvaluationData
) -> list[examples.TrainingExample]:
    """Return pairs of single sentences, as clients send them; half come from two documents."""
    rng = np.random.default_rng(data.seed)
    document_of = np.searchsorted(corpus.documents, np.arange(len(corpus.sentences) - 1), "right")
    followed = np.flatnonzero(np.diff(document_of) == 0)
    special = subject.tokenizer.special
    max_sentence_tokens = (min(data.tokens, subject.max_tokens) - special.pair_tokens) // 2

    def sentence(index: int) -> NDArray[np.unsignedinteger]:
        start, end = corpus.sentences[index], corpus.sentences[index + 1]
        return corpus.tokens[start:end][:max_sentence_tokens]

    pairs = []
    for first in rng.choice(followed, min(data.sequences, len(followed)), replace=False):
        label, second = examples.IS_NEXT, first + 1
        if rng.random() < 0.5:
            label = examples.NOT_NEXT
            second = int(rng.choice(np.flatnonzero(document_of != document_of[first])))
        pairs.append(examples.join_texts(special, sentence(first), sentence(second), label))
    return pairs


def _next_sentence_accuracy(subject: Subject, pairs: list[examples.TrainingExample]) -> float:
    if not pairs:
        raise TrainError("no held-out document has two sentences, which pairs are made of")
    rows = [(pair.input_ids, pair.token_type_ids) for pair in pairs]
    logits = np.stack(row_arrays(subject.scorer, NEXT_SENTENCE, rows))
    return float((logits.argmax(1) == [pair.label for pair in pairs]).mean())


def _measure_sentences(subject: Subject, file: Path, name: str, report: Report) -> dict[str, float]:
    """Report the first word for each sentence; return the accepted and the repeated shares."""
    sentences = read_sentences(file)
    words = complete(sentences, subject.tokenizer, subject.scorer)
    pairs = list(zip(sentences, words, strict=True))
    for sentence, word in pairs:
        report(f"{'right' if sentence.accepts(word) else 'wrong'}: {sentence.text} {word}")
    return {
        name: sum(each.accepts(word) for each, word in pairs) / len(pairs),
        f"{name}_repeats": sum(each.is_repeated_by(word) for each, word in pairs) / len(pairs),
    }


def _measure_questions(subject: Subject, data: EvaluationData) -> dict[str, float]:
    questions = [
        question
        for question in read_questions(data.questions)
        if is_held_out(question.title, data.held_out)
    ]
    if not questions:
        raise TrainError(
            "every question is of an article that training uses; raise the held-out share"
        )
    tokens = min(_WINDOW_TOKENS, subject.max_tokens)
    windows = make_windows(
        questions,
        subject.tokenizer.tokenizer,
        tokens=tokens,
        stride=tokens // 3,
        question_tokens=tokens // 6,
    )
    inputs = [(window.input_ids, window.token_type_ids) for window in windows]
    guesses = best_guesses(questions, windows, row_arrays(subject.scorer, SPAN, inputs))
    threshold = span.no_answer_threshold(subject.options)
    figures = squad_answers(answers_of(questions, guesses, threshold), questions)
    if any(question.impossible for question in questions):
        figures["best_f1"], figures["best_threshold"] = best_threshold(
            questions,
            [guessed.text for guessed in guesses],
            [guessed.null_margin for guessed in guesses],
        )
    return {f"qa_{name}": value for name, value in figures.items()}


# ---- sentences with known answers ----------------------------------------------------------------

_MASK_TOKEN = "[MASK]"
"""The mark of the mask in a file, whatever the tokenizer's mask token is."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence with one mask.

    Attributes:
        words: the accepted words, in lower case.
    """

    text: str
    words: tuple[str, ...]

    def accepts(self, word: str) -> bool:
        """Return whether a word is accepted."""
        return word.lower() in self.words

    def is_repeated_by(self, word: str) -> bool:
        """Return whether a word is not accepted, and stands in the sentence already."""
        return not self.accepts(word) and word.lower() in re.findall(r"\w+", self.text.lower())


def read_sentences(file: Path) -> list[Sentence]:
    """Read sentences: one per line, a tab, and the accepted words separated by commas.

    For example ``I drink a cup of [MASK].<TAB>coffee,tea``.

    Raises:
        DataError: the file is missing, or a line has no tab, no word, or not one mask.
    """
    sentences = []
    for number, line in enumerate(read_lines(file), 1):
        text, _, words = line.partition("\t")
        accepted = tuple(word.strip().lower() for word in words.split(",") if word.strip())
        if text.count(_MASK_TOKEN) != 1 or not accepted:
            raise DataError(
                f"{file}, line {number}: a sentence with one {_MASK_TOKEN}, a tab, and words are "
                f"expected, got {line.strip()!r:.80}"
            )
        sentences.append(Sentence(text, accepted))
    if not sentences:
        raise DataError(f"{file} holds no sentences")
    return sentences


def complete(
    sentences: Sequence[Sentence], tokenizer: CheckpointTokenizer, scorer: Scorer
) -> list[str]:
    """Return the model's first word for each sentence.

    Raises:
        DataError: the tokenizer has no mask token.
    """
    if tokenizer.mask_token is None:
        raise DataError("the tokenizer has no mask token")
    mask_id, rows = tokenizer.mask_id, []
    for sentence in sentences:
        text = sentence.text.replace(_MASK_TOKEN, tokenizer.mask_token)
        ids = np.array(tokenizer.tokenizer.encode(text).ids, np.int64)
        position = np.flatnonzero(ids == mask_id)
        rows.append(MaskedRow(ids, np.zeros_like(ids), position, ids[position]))
    return [tokenizer.readable([int(best[0, 0])]) for best, _ in score_masks(scorer, rows, k=1)]
