"""Calibrates when a question answering model says that there is no answer.

A model that was fine-tuned on few articles is too sure of its answers to questions on others. SQuAD
2.0's script corrects this with a threshold: an answer counts if its score exceeds that of ``[CLS]``
by so much. Here the threshold becomes part of the span head's weights, so that every program that
reads the checkpoint compares with 0.

The hidden state of ``[CLS]`` is far from those of other tokens, so there is a direction along
which it lies at 1 and they lie at 0. Added to the head's two rows of weights, a multiple of this
direction moves the scores of ``[CLS]`` alone.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cloze.export.errors import TrainError
from cloze.export.evaluation.scorer import equal_lengths
from cloze.export.evaluation.squad import Question, best_threshold, read_questions, score
from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.model import Model, TorchScorer
from cloze.export.train.card import CARD
from cloze.export.train.documents import is_held_out
from cloze.export.train.save import save_checkpoint
from cloze.export.train.windows import Guess, Window, guess, usual_windows

_BATCH = 16
_RIDGE = 1e-4
_EVERY = 7
"""Of the other tokens, every seventh is enough."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a calibration changed; F1 in percent.

    Attributes:
        threshold: the best threshold before, in logits.
        f1_before: F1 with threshold 0 before.
        f1_after: F1 with threshold 0 after, on the questions that the threshold was chosen on.
        f1_across: F1 of each half of the questions with the threshold of the other half.
    """

    threshold: float
    f1_before: float
    f1_after: float
    f1_across: float


def calibrate(
    source: str, files: Sequence[Path], held_out: float, folder: Path, device: torch.device
) -> Calibration:
    """Write a copy of a checkpoint whose scores of "no answer" fit held-out questions.

    Args:
        held_out: share of the articles that training held out; only these are used.

    Raises:
        TrainError: the checkpoint has no span head, or the held-out questions are of one kind.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    model, tokenizer = checkpoint.model.to(device), checkpoint.tokenizer
    if model.span is None:
        raise TrainError(f"{source} has no head for question answering; run `train finetune-qa`")
    held = (each for each in read_questions(files) if is_held_out(each.title, held_out))
    questions = [each for each in held if each.impossible or each.is_placed]
    if len({question.impossible for question in questions}) < 2:
        raise TrainError(
            "the held-out articles need questions with and without an answer; give more articles, "
            "or raise the held-out share"
        )
    windows = usual_windows(questions, tokenizer, model.config.max_positions)

    def guesses() -> list[Guess]:
        return guess(questions, windows, TorchScorer(model, device))

    before = guesses()
    threshold = _best(questions, before)
    _move_no_answer(model, windows, -threshold)
    after = guesses()
    save_checkpoint(model, tokenizer, folder)
    if checkpoint.card is not None and not (folder / CARD).exists():
        (folder / CARD).write_text(checkpoint.card, encoding="utf-8")
    return Calibration(
        threshold,
        _f1(questions, before, lambda _: 0.0),
        _f1(questions, after, lambda _: 0.0),
        _f1(questions, before, _other_half(questions, before)),
    )


def _best(questions: Sequence[Question], guesses: Sequence[Guess]) -> float:
    margins = [each.null_margin for each in guesses]
    return best_threshold(questions, [each.text for each in guesses], margins)[1]


def _f1(
    questions: Sequence[Question],
    guesses: Sequence[Guess],
    threshold: Callable[[Question], float],
) -> float:
    """Return the F1 if each question has its own threshold."""
    answers = {
        question.id: "" if each.null_margin > threshold(question) else each.text
        for question, each in zip(questions, guesses, strict=True)
    }
    return score(answers, questions)["f1"]


def _half(question: Question) -> int:
    return hashlib.sha256(question.id.encode()).digest()[0] % 2


def _other_half(
    questions: Sequence[Question], guesses: Sequence[Guess]
) -> Callable[[Question], float]:
    """Return the function that gives a question the threshold of the half that it is not in."""
    halves: list[list[tuple[Question, Guess]]] = [[], []]
    for question, each in zip(questions, guesses, strict=True):
        halves[_half(question)].append((question, each))
    thresholds = [
        _best([question for question, _ in half], [each for _, each in half]) if half else 0.0
        for half in halves
    ]
    return lambda question: thresholds[1 - _half(question)]


@torch.inference_mode()
def _move_no_answer(model: Model, windows: Sequence[Window], logits: float) -> None:
    """Add to the score of "no answer", the sum of the two logits of ``[CLS]``."""
    assert model.span is not None
    direction = _direction(*_states(model, windows)).to(model.span.classifier.weight)
    model.span.classifier.weight += logits / 2 * direction


def _states(model: Model, windows: Sequence[Window]) -> tuple[Tensor, Tensor]:
    """Return the hidden states of ``[CLS]``, and of a part of the other tokens."""
    model.eval()
    device = model.span.classifier.weight.device if model.span is not None else None
    first, others = [], []
    for members in equal_lengths([len(window.input_ids) for window in windows], _BATCH):
        group = [windows[index] for index in members]
        ids = torch.from_numpy(np.stack([each.input_ids for each in group])).to(device)
        types = torch.from_numpy(np.stack([each.token_type_ids for each in group])).to(device)
        states = model(ids, types, torch.ones_like(ids, dtype=torch.bool)).double()
        first.append(states[:, 0])
        others.append(states[:, 1:].flatten(0, 1)[::_EVERY])
    return torch.cat(first), torch.cat(others)


def _direction(first: Tensor, others: Tensor) -> Tensor:
    """Return the vector whose product is higher by 1 for ``first`` than for ``others``.

    By ridge regression with an intercept. Both groups count as much, however many rows they have.
    """
    rows = torch.cat([first, others])
    target = torch.cat([torch.ones(len(first)), torch.zeros(len(others))]).to(rows)
    weight = torch.cat([1 / len(group) * torch.ones(len(group)) for group in (first, others)])
    weight = weight.to(rows) / 2
    centred = rows - weight @ rows
    gram = (centred * weight[:, None]).T @ centred
    ridge = _RIDGE * torch.eye(len(gram)).to(rows)
    vector: Tensor = torch.linalg.solve(
        gram + ridge, (centred * weight[:, None]).T @ (target - 0.5)
    )
    distance: Tensor = (first @ vector).mean() - (others @ vector).mean()
    return vector / distance
