"""One face for what is evaluated: a torch model or an exported graph. Rows of one call have one length: no padding."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from export.models import Model
from export.sentence import EmbeddingRecipe
from export.session import Session
from model_store import interface as names
from model_store import packing
from model_store.manifest import Layout, Task

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Array = NDArray[Any]


class Scorer(Protocol):
    """What evaluation asks of a model. Shapes: B rows of S tokens, M masks, K best."""

    def masked(self, input_ids: Ids, token_type_ids: Ids, positions: Ids, labels: Ids, k: int) -> tuple[Ids, Floats]:
        """Masks at flat ``positions`` [M] of ``[B, S]`` -> best ids [M, K], and log probability of ``labels`` [M], in nats."""

    def next_sentence(self, input_ids: Ids, token_type_ids: Ids) -> Floats:
        """``[B, S]`` -> logits [B, 2]."""

    def spans(self, input_ids: Ids, token_type_ids: Ids) -> Floats:
        """``[B, S]`` -> start and end logits [B, S, 2]."""

    def embed(self, input_ids: Ids) -> Floats:
        """``[B, S]`` -> embeddings [B, D], not normalised."""


class TorchScorer:
    """A torch model, in fp32."""

    def __init__(self, model: Model, device: torch.device, recipe: EmbeddingRecipe | None = None) -> None:
        self._model, self._device, self._recipe = model, device, recipe or EmbeddingRecipe()

    @torch.inference_mode()
    def masked(self, input_ids: Ids, token_type_ids: Ids, positions: Ids, labels: Ids, k: int) -> tuple[Ids, Floats]:
        """See `Scorer`."""
        assert self._model.masked_lm is not None
        rows = self._hidden(input_ids, token_type_ids).flatten(0, 1)[torch.from_numpy(positions).to(self._device)]
        scores = self._model.masked_lm(rows).log_softmax(-1)
        told = scores.gather(1, torch.from_numpy(labels).to(self._device)[:, None])[:, 0]
        return scores.topk(k).indices.cpu().numpy(), told.cpu().numpy()

    @torch.inference_mode()
    def next_sentence(self, input_ids: Ids, token_type_ids: Ids) -> Floats:
        """See `Scorer`."""
        assert self._model.next_sentence is not None
        logits: Floats = self._model.next_sentence(self._hidden(input_ids, token_type_ids)[:, 0]).cpu().numpy()
        return logits

    @torch.inference_mode()
    def spans(self, input_ids: Ids, token_type_ids: Ids) -> Floats:
        """See `Scorer`."""
        assert self._model.span is not None
        logits: Floats = self._model.span(self._hidden(input_ids, token_type_ids)).cpu().numpy()
        return logits

    @torch.inference_mode()
    def embed(self, input_ids: Ids) -> Floats:
        """See `Scorer`."""
        embeddings: Floats = self._recipe.pool(self._hidden(input_ids, np.zeros_like(input_ids))).cpu().numpy()
        return embeddings

    def _hidden(self, input_ids: Ids, token_type_ids: Ids) -> Tensor:
        self._model.eval()
        ids, types = (torch.from_numpy(array).to(self._device) for array in (input_ids, token_type_ids))
        hidden: Tensor = self._model(ids, types)
        return hidden


class GraphScorer:
    """An exported graph.

    Args:
        session: on the graph, see `open_session`.
        layout: the graph's.
        tasks: whose heads it has.
        token_types: whether it takes them.
        pooling: of its embeddings, if it has any.
    """

    def __init__(self, session: Session, layout: Layout, tasks: Iterable[Task], *, token_types: bool, pooling: str = "") -> None:
        self._session = session
        self._packed, self._tasks, self._token_types = layout is Layout.PACKED, tuple(tasks), token_types
        self._pooling = pooling

    def masked(self, input_ids: Ids, token_type_ids: Ids, positions: Ids, labels: Ids, k: int) -> tuple[Ids, Floats]:
        """See `Scorer`."""
        asked: dict[str, Array] = {
            names.MASK_ROWS: positions.astype(np.int32),
            names.TOP_K: np.array([k], np.int64),
            names.TARGET_MASKS: np.arange(len(positions), dtype=np.int32),
            names.TARGET_IDS: labels.astype(np.int32),
        }
        wanted = (names.TOP_IDS, names.TARGET_LOGITS, names.LOGSUMEXP)
        best, logits, total = self._run(Task.FILL_MASK, input_ids, token_type_ids, asked, wanted)
        return best, logits - total

    def next_sentence(self, input_ids: Ids, token_type_ids: Ids) -> Floats:
        """See `Scorer`."""
        rows = np.arange(len(input_ids), dtype=np.int32) * np.int32(input_ids.shape[1])
        logits: Floats = self._run(Task.NSP, input_ids, token_type_ids, {names.PAIR_ROWS: rows}, (names.PAIR_LOGITS,))[0]
        return logits

    def spans(self, input_ids: Ids, token_type_ids: Ids) -> Floats:
        """See `Scorer`."""
        logits: Floats = self._run(Task.QA, input_ids, token_type_ids, {}, (names.SPAN_LOGITS,))[0]
        return logits.reshape(*input_ids.shape, 2)

    def embed(self, input_ids: Ids) -> Floats:
        """See `Scorer`."""
        asked = {names.EMBED_SEQUENCES: np.arange(len(input_ids), dtype=np.int32)}
        embeddings: Floats = self._run(Task.EMBED, input_ids, np.zeros_like(input_ids), asked, (names.EMBEDDINGS,))[0]
        return embeddings

    def _run(
        self, task: Task, input_ids: Ids, token_type_ids: Ids, asked: Mapping[str, Array], wanted: tuple[str, ...]
    ) -> list[Any]:
        """One run; the heads that are not asked get no rows."""
        nothing = {
            Task.FILL_MASK: {name: np.zeros(0, np.int32) for name in (names.MASK_ROWS, names.TARGET_MASKS, names.TARGET_IDS)}
            | {names.TOP_K: np.ones(1, np.int64)},
            Task.NSP: {names.PAIR_ROWS: np.zeros(0, np.int32)},
            Task.EMBED: {names.EMBED_SEQUENCES: np.zeros(0, np.int32)},
            Task.QA: {},
        }
        feeds: dict[str, Array] = {names.INPUT_IDS: input_ids.astype(np.int32)}
        if self._token_types:
            feeds[names.TOKEN_TYPE_IDS] = token_type_ids.astype(np.int32)
        for other in self._tasks:
            feeds |= asked if other is task else nothing[other]
        return self._session.run(list(wanted), self._pack(feeds, input_ids.shape) if self._packed else feeds)

    def _pack(self, feeds: dict[str, Array], shape: tuple[int, ...]) -> dict[str, Array]:
        """The inputs of a dense graph, ``[B, S]``, as those of a packed one."""
        lengths = np.full(shape[0], shape[1], np.int32)
        chosen = feeds.pop(names.EMBED_SEQUENCES, None)
        feeds = {name: array.reshape(-1) for name, array in feeds.items()} | packing.place(lengths)
        if chosen is not None:
            feeds |= packing.pool(packing.starts_of(lengths)[chosen], lengths[chosen], self._pooling)
        return feeds
