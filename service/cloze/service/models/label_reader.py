"""Computes the vectors of labels of a bi-encoder, each once at a time, and keeps them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import embedding
from cloze.service.batching.fair_queue import Queue, Submission, Terms
from cloze.service.core import BatchResult, Float32
from cloze.service.errors import ServiceError
from cloze.service.tasks.label_vectors import LabelCache, LabelVectors

_Outcome = dict[str, Float32] | ServiceError
"""The vectors by label, or why there are none."""


class LabelReader:
    """Fills the vectors of labels that are missing; all methods run on the event loop.

    Args:
        queue: of the encoder of labels.
        wait: returns the result of a submission.
    """

    def __init__(
        self,
        cache: LabelCache,
        queue: Queue,
        wait: Callable[[Submission], Awaitable[BatchResult]],
    ) -> None:
        self.cache, self._queue, self._wait = cache, queue, wait
        self._running: dict[str, asyncio.Task[_Outcome]] = {}  # by each of its labels

    async def fill(self, labels: LabelVectors, terms: Terms) -> None:
        """Fill the vectors that are missing.

        Labels that another request computes now are not computed again, unless that fails.

        Raises:
            ServiceError: the encoder of labels refuses the labels, or fails.
        """
        missing = dict(labels.missing)
        while missing:
            tasks = {self._running[label] for label in missing if label in self._running}
            new = {n: encoding for n, (_, encoding) in missing.items() if n not in self._running}
            own = None
            if new:
                own = asyncio.create_task(self._compute(new, terms))
                self._running |= dict.fromkeys(new, own)
                tasks.add(own)
            # They run on if this request is cancelled: others may wait for them too.
            await asyncio.wait(tasks)
            for task in tasks:
                if not isinstance(vectors := task.result(), ServiceError):
                    for label in missing.keys() & vectors.keys():
                        row, _ = missing.pop(label)
                        labels.array[row] = vectors[label]
                elif task is own:
                    raise vectors

    async def _compute(self, encodings: Mapping[str, Encoding], terms: Terms) -> _Outcome:
        """Return the vectors of labels, and keep them."""
        try:
            submission = Submission(terms, [*encodings.values()])
            self._queue.submit(submission)
            outputs = (await self._wait(submission)).outputs
        except ServiceError as error:
            return error
        finally:
            for label in encodings:
                del self._running[label]
        # Not views of the arrays of whole batches.
        arrays = (output[embedding.HEAD.name].array.copy() for output in outputs)
        vectors = dict(zip(encodings, arrays, strict=True))
        for label, vector in vectors.items():
            self.cache.keep(label, vector)
        return vectors
