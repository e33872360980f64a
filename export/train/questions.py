"""Fine-tuning for question answering: windows over paragraphs, start and end, answers out of logits.

Sources: Devlin et al. 2019, sections 4.2 and 4.3 (a question without an answer points at ``[CLS]``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from export.checkpoint import load_checkpoint
from export.evaluation.scorer import Scorer, TorchScorer, equal_lengths, span_logits
from export.evaluation.squad import Question, read_questions, score
from export.heads import SPAN
from export.models import Model
from export.train.batches import padded_length, shuffled_batches
from export.train.card import write_card
from export.train.corpus import fingerprint, is_held_out
from export.train.errors import TrainError
from export.train.loop import Schedule, train
from export.train.pretrain import CHECKPOINT
from export.train.recipe import QuestionsRecipe
from export.train.run_folder import claim
from export.train.save import save_checkpoint
from export.train.start import start_from
from export.train.vocabulary import special_ids

MAX_ANSWER_TOKENS = 30
_N_BEST = 20


@dataclass(frozen=True, slots=True)
class Window:
    """A question and as much of its paragraph as fits.

    Attributes:
        question: index of the question.
        input_ids, token_type_ids: int64 [S].
        offsets: int64 [S, 2], first and end character in the paragraph; -1 outside it.
        start, end: the answer's first and last token; 0 (``[CLS]``) if it is not in this window.
    """

    question: int
    input_ids: NDArray[np.int64]
    token_type_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    start: int
    end: int


def make_windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    tokens: int,
    stride: int,
    question_tokens: int,
) -> list[Window]:
    """Cut each paragraph into windows that share ``stride`` tokens with their neighbours.

    Raises:
        TrainError: the sizes leave no room for the paragraph.
    """
    if question_tokens + 3 + stride >= tokens:
        raise TrainError(
            f"windows of {tokens} tokens leave no room beside {question_tokens} of the question and a stride of {stride}"
        )
    asked = tokenizer.encode_batch(
        [question.question for question in questions], add_special_tokens=False
    )
    texts = tokenizer.encode_batch(
        [question.context for question in questions], add_special_tokens=False
    )
    special = special_ids(tokenizer)
    windows = []
    for index, (question, head, text) in enumerate(zip(questions, asked, texts, strict=True)):
        prefix = [special.cls, *head.ids[:question_tokens], special.sep]
        ids, offsets = (
            np.asarray(text.ids, np.int64),
            np.asarray(text.offsets, np.int64).reshape(-1, 2),
        )
        room = tokens - len(prefix) - 1
        answered = _find(question, offsets)
        for begin in range(0, max(len(ids) - stride, 1), room - stride):
            part, places = ids[begin : begin + room], offsets[begin : begin + room]
            start, end = _within(answered, begin, len(part), len(prefix))
            nowhere = np.full((len(prefix), 2), -1)
            windows.append(
                Window(
                    index,
                    np.concatenate([prefix, part, [special.sep]]).astype(np.int64),
                    np.repeat([0, 1], [len(prefix), len(part) + 1]),
                    np.concatenate([nowhere, places, nowhere[:1]]),
                    start,
                    end,
                )
            )
    return windows


def _find(question: Question, offsets: NDArray[np.int64]) -> tuple[int, int] | None:
    """First and last of the paragraph's tokens that the first placed answer touches."""
    for at, text in question.answers:
        if at is not None:
            covered = np.flatnonzero((offsets[:, 1] > at) & (offsets[:, 0] < at + len(text)))
            if len(covered):
                return int(covered[0]), int(covered[-1])
    return None


def _within(answered: tuple[int, int] | None, begin: int, size: int, shift: int) -> tuple[int, int]:
    """The same in a window of ``size`` tokens from ``begin`` on; ``[CLS]`` if it is not wholly there."""
    if answered is None or answered[0] < begin or answered[1] >= begin + size:
        return 0, 0
    return answered[0] - begin + shift, answered[1] - begin + shift


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows padded to the longest: int64 [B, S] (mask bool), and int64 [B] start and end."""

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor
    start: Tensor
    end: Tensor

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.attention_mask.sum())

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(*(getattr(self, field.name).to(device) for field in fields(self)))


def collate_windows(windows: Sequence[Window], tokens: int) -> WindowBatch:
    """Pad with zeros to a little more than the longest, ``tokens`` at most."""
    shape = (len(windows), padded_length(max(len(window.input_ids) for window in windows), tokens))
    ids, types, mask = (
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
    )
    for row, window in enumerate(windows):
        size = len(window.input_ids)
        ids[row, :size], types[row, :size], mask[row, :size] = (
            torch.from_numpy(window.input_ids),
            torch.from_numpy(window.token_type_ids),
            True,
        )
    return WindowBatch(
        ids,
        types,
        mask,
        torch.tensor([window.start for window in windows]),
        torch.tensor([window.end for window in windows]),
    )


def answer(
    questions: Sequence[Question], windows: Sequence[Window], scorer: Scorer, *, batch: int = 16
) -> dict[str, str]:
    """The best answer of each question over its windows; where some have none, it is empty if ``[CLS]`` scores higher."""
    may_be_none = any(question.impossible for question in questions)
    best = [(-np.inf, "")] * len(questions)
    null = [np.inf] * len(questions)
    for members in equal_lengths([len(window.input_ids) for window in windows], batch):
        group = [windows[index] for index in members]
        logits = span_logits(
            scorer,
            np.stack([w.input_ids for w in group]),
            np.stack([w.token_type_ids for w in group]),
        )
        for window, rows in zip(group, logits, strict=True):
            found, (first, last) = _best_span(rows, window.offsets[:, 0] >= 0)
            text = questions[window.question].context[
                window.offsets[first, 0] : window.offsets[last, 1]
            ]
            best[window.question] = max(best[window.question], (found, text))
            null[window.question] = min(null[window.question], float(rows[0].sum()))
    return {
        question.id: "" if may_be_none and null[index] > best[index][0] else best[index][1]
        for index, question in enumerate(questions)
    }


def _best_span(
    logits: NDArray[np.float32], context: NDArray[np.bool_]
) -> tuple[float, tuple[int, int]]:
    """``logits`` [S, 2], ``context`` bool [S] -> the highest start + end with 0 <= end - start < `MAX_ANSWER_TOKENS`."""
    places = np.flatnonzero(context)
    starts = places[np.argsort(-logits[places, 0])[:_N_BEST]]
    found = (-np.inf, (0, 0))
    for start in starts:
        ends = places[(places >= start) & (places < start + MAX_ANSWER_TOKENS)]
        end = ends[np.argmax(logits[ends, 1])]
        found = max(found, (float(logits[start, 0] + logits[end, 1]), (int(start), int(end))))
    return found


class QuestionObjective:
    """Start and end of the answer, each a choice among a window's tokens."""

    def __init__(
        self,
        model: Model,
        windows: list[Window],
        recipe: QuestionsRecipe,
        held_out: Callable[[], Mapping[str, float]],
    ) -> None:
        self.module = model
        self._batches = shuffled_batches(
            [len(w.input_ids) for w in windows], recipe.sequences, recipe.seed
        )
        self._windows, self._held_out, self._accumulation = (
            windows,
            held_out,
            recipe.optimisation.accumulation,
        )
        self._tokens = recipe.tokens
        self.steps = max(1, recipe.epochs * len(windows) // (recipe.sequences * self._accumulation))

    def batch(self, step: int, part: int) -> WindowBatch:
        """See `loop.Objective`."""
        chosen = self._batches(step * self._accumulation + part)
        return collate_windows([self._windows[index] for index in chosen], self._tokens)

    def loss(self, batch: WindowBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `loop.Objective`."""
        assert self.module.span is not None
        logits = self.module.span(
            self.module(batch.input_ids, batch.token_type_ids, batch.attention_mask)
        ).float()  # [B, S, 2]
        logits = logits.masked_fill(~batch.attention_mask[:, :, None], -torch.inf)
        start, end = logits.unbind(-1)
        loss = (F.cross_entropy(start, batch.start) + F.cross_entropy(end, batch.end)) / 2
        right = (start.argmax(1) == batch.start) & (end.argmax(1) == batch.end)
        return loss, {"accuracy": right.float().mean()}

    def evaluate(self, _: int) -> Mapping[str, float]:
        """EM and F1 on held-out articles."""
        self.module.eval()
        return self._held_out()


def finetune_questions(
    source: str,
    files: list[Path],
    recipe: QuestionsRecipe,
    folder: Path,
    *,
    device: torch.device,
    schedule: Schedule,
    say: Callable[[str], None],
) -> Path:
    """Fine-tune a checkpoint on questions; returns the folder of the new one, which has a span head only.

    Raises:
        TrainError: the files hold no question, or the windows are longer than the checkpoint takes.
        ExportError: the checkpoint cannot be loaded.
    """
    checkpoint = load_checkpoint(source)
    claim(
        folder,
        recipe,
        {"checkpoint": checkpoint.source.weights_sha256, "file of questions": fingerprint(files)},
    )
    start = start_from(checkpoint, [SPAN], dropout=recipe.dropout, seed=recipe.seed)
    if recipe.tokens > start.model.config.max_positions:
        raise TrainError(
            f"windows of {recipe.tokens} tokens exceed the checkpoint's {start.model.config.max_positions} positions"
        )
    questions = read_questions(files)
    kept = [q for q in questions if recipe.unanswerable or not q.impossible]
    learnt = [
        q
        for q in kept
        if not is_held_out(q.title, recipe.held_out) and (q.impossible or q.is_placed)
    ]
    held_out = [q for q in kept if is_held_out(q.title, recipe.held_out)]
    sizes = {
        "tokens": recipe.tokens,
        "stride": recipe.stride,
        "question_tokens": recipe.question_tokens,
    }
    windows = make_windows(learnt, start.tokenizer, **sizes)
    unseen = make_windows(held_out, start.tokenizer, **sizes)
    say(
        f"{len(learnt):,} questions to learn from in {len(windows):,} windows; {len(held_out):,} held out"
    )
    if not windows:
        raise TrainError(
            "every question is of a held-out article; lower held_out or give more articles"
        )
    scorer = TorchScorer(start.model, device)

    def evaluate() -> dict[str, float]:
        return (
            {k: v / 100 for k, v in score(answer(held_out, unseen, scorer), held_out).items()}
            if held_out
            else {}
        )

    objective = QuestionObjective(start.model, windows, recipe, evaluate)
    train(
        objective,
        recipe.seed,
        recipe.optimisation,
        folder,
        device=device,
        schedule=schedule,
        say=say,
    )
    save_checkpoint(start.model, start.tokenizer, folder / CHECKPOINT)
    title = "An encoder fine-tuned for question answering"
    write_card(
        folder / CHECKPOINT, title=title, source=source, files=files, recipe=recipe, device=device
    )
    return folder / CHECKPOINT
