"""Measures a checkpoint or a bundle on text, pairs and questions: all of them, or those that training held out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from export.checkpoint import load_checkpoint
from export.evaluation.bias import read_stereotypes, stereotype_preference
from export.evaluation.pairs import read_pairs, similarity
from export.evaluation.scorer import (
    GraphScorer,
    Scorer,
    TorchScorer,
    equal_lengths,
    next_sentence_logits,
    score_masks,
)
from export.evaluation.squad import read_questions, score
from export.heads import EMBEDDING, MASKED_LM, NEXT_SENTENCE, SPAN
from export.session import open_session
from export.train.corpus import Corpus, is_held_out, prepare_corpus
from export.train.errors import TrainError
from export.train.masking import Masked, Unit
from export.train.pairs import IS_NEXT, Sentence, Sequence, Sequences
from export.train.pretrain import make_masking, open_tokenizer
from export.train.questions import answer, make_windows
from export.train.recipe import Pretraining
from export.train.vocabulary import special_ids
from model_store.manifest import Precision
from model_store.store import Store

_TOP = 5


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a checkpoint on torch, or a bundle on its own graph."""

    scorer: Scorer
    tokenizer: Tokenizer
    heads: frozenset[str]
    max_tokens: int


def open_subject(
    source: str, store: Store, device: torch.device, precision: Precision = Precision.FP32
) -> Subject:
    """A checkpoint's folder or hub id; or ``bundle:NAME[@VERSION]`` of the store, its graph of this precision.

    Raises:
        ExportError, StoreError: it cannot be opened.
    """
    if source.startswith("bundle:"):
        bundle = store.open(source.removeprefix("bundle:"))
        manifest = bundle.manifest
        graph = manifest.graph_of(precision)
        if graph is None:
            raise TrainError(f"bundle {manifest.reference} has no {precision} graph")
        spec = manifest.graph_spec(graph.layout)
        session = open_session(bundle.file(graph.file), graph.layout)
        scorer: Scorer = GraphScorer(session, spec)
        limit = manifest.limits.max_tokens
        return Subject(scorer, open_tokenizer(bundle.path), frozenset(spec.heads), limit)
    checkpoint = load_checkpoint(source)
    scorer = TorchScorer(checkpoint.model.to(device), device, checkpoint.recipe)
    positions = checkpoint.model.config.max_positions
    heads = frozenset(head.name for head in checkpoint.heads)
    return Subject(scorer, checkpoint.tokenizer.tokenizer, heads, positions)


@dataclass(frozen=True, slots=True)
class Data:
    """What to measure on. Text and questions are split by their titles as training does; pairs are all used.

    Attributes:
        held_out: the share of titles that training left out; 1: everything is used.
        sequences: how many masked sequences, and how many pairs of texts.
        tokens: of such a sequence.
    """

    text: list[Path]
    pairs: list[Path]
    questions: list[Path]
    held_out: float
    stereotypes: Path | None = None
    sequences: int = 1000
    tokens: int = 128
    seed: int = 1


def evaluate(
    subject: Subject, data: Data, folder: Path, say: Callable[[str], None]
) -> dict[str, float]:
    """Every figure that the subject's tasks and the data allow; shares in [0, 1], EM and F1 in percent.

    Args:
        subject: what to measure.
        data: what on.
        folder: where tokenized text is kept.
        say: is told what happens, a line each.

    Raises:
        TrainError: see the readers; or nothing held out is left.
    """
    figures: dict[str, float] = {}
    if data.text and subject.heads & {MASKED_LM, NEXT_SENTENCE}:
        corpus = prepare_corpus(
            data.text,
            subject.tokenizer,
            folder,
            held_out=data.held_out,
            only_held_out=True,
            say=say,
        ).held_out
        if MASKED_LM in subject.heads:
            for unit in (Unit.TOKEN, Unit.WHOLE_WORD):
                found = _fill_mask(subject, corpus, unit, data)
                figures |= {
                    f"fill_mask_{unit.replace('-', '_')}_{name}": value
                    for name, value in found.items()
                }
        if NEXT_SENTENCE in subject.heads:
            figures["nsp_accuracy"] = _next_sentence(
                subject, _pairs_of_texts(subject, corpus, data)
            )
            figures["nsp_accuracy_two_sentences"] = _next_sentence(
                subject, _pairs_of_sentences(subject, corpus, data)
            )
    if data.pairs and EMBEDDING in subject.heads:
        figures["sts_spearman"] = similarity(
            read_pairs(data.pairs), subject.tokenizer, subject.scorer, min(128, subject.max_tokens)
        )
    if data.stereotypes and MASKED_LM in subject.heads:
        pairs = read_stereotypes(data.stereotypes)
        figures["stereotype_preference"] = stereotype_preference(
            pairs, subject.tokenizer, subject.scorer, subject.max_tokens
        )
    if data.questions and SPAN in subject.heads:
        figures |= _questions(subject, data)
    return figures


def _fill_mask(subject: Subject, corpus: Corpus, unit: Unit, data: Data) -> dict[str, float]:
    """Every chosen token is a ``[MASK]``, as a user sends it."""
    masking = make_masking(subject.tokenizer, Pretraining(unit=unit), replace=(1.0, 0.0))
    sequences = _sequences(subject, corpus, Sentence.NONE, data)
    rows: list[tuple[Sequence, Masked]] = []
    for number in range(min(data.sequences, len(sequences))):
        rng = sequences.rng(number)
        sequence = sequences.make(number, rng)
        rows.append((sequence, masking(sequence.input_ids, rng)))
    top, top5, log_likelihood, count = 0, 0, 0.0, 0
    for group in equal_lengths([len(masked.input_ids) for _, masked in rows], 32):
        ids = np.stack([rows[index][1].input_ids for index in group])
        types = np.stack([rows[index][0].token_type_ids for index in group])
        positions = np.concatenate(
            [rows[index][1].positions + at * ids.shape[1] for at, index in enumerate(group)]
        )
        labels = np.concatenate([rows[index][1].labels for index in group])
        if not len(labels):
            continue
        best, told = score_masks(subject.scorer, ids, types, positions, labels, k=_TOP)
        hits = best == labels[:, None]
        top, top5, log_likelihood = (
            top + int(hits[:, 0].sum()),
            top5 + int(hits.any(1).sum()),
            log_likelihood + float(told.sum()),
        )
        count += len(labels)
    if not count:
        raise TrainError("there is no held-out text to measure on")
    return {
        "top1": top / count,
        "top5": top5 / count,
        "perplexity": math.exp(-log_likelihood / count),
    }


def _sequences(subject: Subject, corpus: Corpus, sentence: Sentence, data: Data) -> Sequences:
    length, special = min(data.tokens, subject.max_tokens), special_ids(subject.tokenizer)
    return Sequences(
        corpus,
        length=length,
        sentence=sentence,
        special=special,
        seed=data.seed,
        epoch=0,
        short=0.0,
    )


def _pairs_of_texts(subject: Subject, corpus: Corpus, data: Data) -> list[Sequence]:
    """Pairs as in training: two texts that fill a sequence, the second of another document half of the time."""
    sequences = _sequences(subject, corpus, Sentence.NSP, data)
    return [
        sequences.make(number, sequences.rng(number))
        for number in range(min(data.sequences, len(sequences)))
    ]


def _pairs_of_sentences(subject: Subject, corpus: Corpus, data: Data) -> list[Sequence]:
    """The harder question that users send: one sentence and one sentence."""
    rng = np.random.default_rng(data.seed)
    special = special_ids(subject.tokenizer)
    room = min(data.tokens, subject.max_tokens) - 3
    document_of = np.searchsorted(corpus.documents, np.arange(len(corpus.sentences) - 1), "right")
    followed = np.flatnonzero(np.diff(document_of) == 0)
    pairs = []
    for first in rng.choice(followed, min(data.sequences, len(followed)), replace=False):
        label, second = IS_NEXT, first + 1
        if rng.random() < 0.5:
            label, second = (
                1 - IS_NEXT,
                int(rng.choice(np.flatnonzero(document_of != document_of[first]))),
            )
        a, b = (
            corpus.tokens[corpus.sentences[i] : corpus.sentences[i + 1]][: room // 2]
            for i in (first, second)
        )
        ids = np.concatenate([[special.cls], a, [special.sep], b, [special.sep]]).astype(np.int64)
        pairs.append(Sequence(ids, np.repeat([0, 1], [len(a) + 2, len(b) + 1]), label))
    return pairs


def _next_sentence(subject: Subject, pairs: list[Sequence]) -> float:
    if not pairs:
        raise TrainError("no held-out document has two sentences, which pairs are made of")
    right = 0
    for group in equal_lengths([len(pair.input_ids) for pair in pairs], 32):
        chosen = [pairs[index] for index in group]
        logits = next_sentence_logits(
            subject.scorer,
            np.stack([p.input_ids for p in chosen]),
            np.stack([p.token_type_ids for p in chosen]),
        )
        right += int((logits.argmax(1) == [p.label for p in chosen]).sum())
    return right / len(pairs)


def _questions(subject: Subject, data: Data) -> dict[str, float]:
    questions = [
        question
        for question in read_questions(data.questions)
        if is_held_out(question.title, data.held_out)
    ]
    if not questions:
        raise TrainError(
            "every question is of an article that training uses; raise the held-out share"
        )
    tokens = min(384, subject.max_tokens)
    windows = make_windows(
        questions, subject.tokenizer, tokens=tokens, stride=tokens // 3, question_tokens=tokens // 6
    )
    return {
        f"qa_{name}": value
        for name, value in score(answer(questions, windows, subject.scorer), questions).items()
    }
