"""The way of a request inside the service: tokenize, queue, decode, under one deadline. One pipeline a model. No HTTP."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from model_store import Manifest, Task
from service.core import DeadlineExceeded, Float32, Queue, Timings, UnknownModel, WrongTask
from service.tasks import Prepared, TaskLimits, embed, fill_mask, nsp, qa
from service.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_CHARACTERS = 4_000
"""Shorter requests are tokenized on the event loop: about 1 ms at most, less than two thread hops under load are worth."""

_INLINE_RESULTS = 64
"""Fewer predictions are decoded on the event loop: each costs about 10 us."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[T]):
    """A task's result and what it took.

    Attributes:
        tokens: run by the engine, special tokens included.
        truncated: how many texts were cut.
        warnings: for the client, in ASCII.
    """

    value: T
    tokens: int
    truncated: int
    warnings: tuple[str, ...]
    timings: Timings


class Pipeline:
    """One served model.

    Args:
        manifest: its bundle's.
        tokenizer: its bundle's.
        scheduler: where its requests wait.
        precision: of the graph that the engine runs.
        limits: the most that a request may ask of a task.
        request_timeout_s: after this a request fails with `DeadlineExceeded`.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: Tokenizer,
        scheduler: Queue,
        *,
        precision: Callable[[], str],
        limits: TaskLimits,
        request_timeout_s: float,
    ) -> None:
        self.manifest = manifest
        self._precision = precision
        self.scheduler = scheduler
        self._tokenizer = tokenizer
        self._limits = limits
        self._request_timeout_s = request_timeout_s

    @property
    def precision(self) -> str:
        """Of the graph that the engine runs; empty while no engine has said so."""
        return self._precision()

    async def fill_mask(
        self, texts: Sequence[str], *, top_k: int, targets: Sequence[str], many: bool
    ) -> Reply[list[fill_mask.Masks]]:
        """Predictions of each mask of each text."""
        return await self._run(
            sum(map(len, texts)) + sum(map(len, targets)),
            lambda: fill_mask.prepare(self._tokenizer, texts, self._limits, top_k=top_k, targets=targets, many=many),
        )

    async def embed(self, texts: Sequence[embed.Text], options: embed.EmbedOptions, *, many: bool) -> Reply[Float32]:
        """One vector a text: [n, D] float32."""
        recipe = self.manifest.embedding
        assert recipe is not None
        return await self._run(
            sum(map(len, texts)), lambda: embed.prepare(self._tokenizer, texts, recipe, options, self._limits, many=many)
        )

    async def nsp(self, pairs: Sequence[tuple[str, str]], names: Sequence[str]) -> Reply[Float32]:
        """Probabilities [n, 2] float32: the second text is next, it is not."""
        return await self._run(
            sum(len(text) for pair in pairs for text in pair),
            lambda: nsp.prepare(self._tokenizer, pairs, names, self._limits),
        )

    async def qa(
        self, pairs: Sequence[tuple[str, str]], names: Sequence[str], options: qa.QaOptions
    ) -> Reply[list[list[qa.QaAnswer]]]:
        """The best answers to each (question, context)."""
        return await self._run(
            sum(len(text) for pair in pairs for text in pair),
            lambda: qa.prepare(self._tokenizer, pairs, names, self._limits, options),
        )

    async def _run(self, characters: int, prepare: Callable[[], Prepared[T]]) -> Reply[T]:
        """Tokenize, wait for the scheduler, decode. Cancelling it cancels what has not run yet.

        Args:
            characters: in the request, which decides where it is tokenized and decoded.
            prepare: tokenizes.
        """
        accepted = not self.scheduler.draining
        started = time.monotonic()
        deadline = started + self._request_timeout_s
        inline = characters <= _INLINE_CHARACTERS
        try:
            async with asyncio.timeout(self._request_timeout_s):
                prepared = prepare() if inline else await asyncio.to_thread(prepare)
                tokenized = time.monotonic()
                answer = await asyncio.wrap_future(self.scheduler.submit(prepared.queries, deadline, accepted=accepted))
                inline = inline and prepared.results <= _INLINE_RESULTS
                decode = prepared.decode
                value = decode(answer.outputs) if inline else await asyncio.to_thread(decode, answer.outputs)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer within the limit of {self._request_timeout_s * 1000:.0f} ms") from None
        return Reply(
            value=value,
            tokens=sum(map(len, prepared.queries)),
            truncated=prepared.truncated,
            warnings=prepared.warnings,
            timings=Timings(tokenized - started, answer.queue_s, answer.inference_s),
        )


class Models:
    """The served models, and which of them answers a request.

    Args:
        pipelines: at least one; of those that can do a task, the first is its default.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self.pipelines = tuple(pipelines)
        self._by_name: dict[str, Pipeline] = {}
        for pipeline in sorted(pipelines, key=lambda pipeline: pipeline.manifest.version):
            self._by_name[pipeline.manifest.name] = pipeline  # the newest version answers to the bare name
            self._by_name[pipeline.manifest.reference] = pipeline

    def default(self, task: Task) -> Pipeline | None:
        """Who answers a request that names no model."""
        return next((pipeline for pipeline in self.pipelines if task in pipeline.manifest.tasks), None)

    def choose(self, task: Task, name: str | None) -> Pipeline:
        """The model of a name, or the task's default.

        Raises:
            UnknownModel: no model of that name is served.
            WrongTask: the model has no head for the task, or no served model has.
        """
        if name is None:
            if (pipeline := self.default(task)) is None:
                raise WrongTask(f"no served model can do {task}")
            return pipeline
        if (named := self._by_name.get(name)) is None:
            raise UnknownModel(f"no model {ascii(name)[:80]} is served (there: {', '.join(sorted(self._by_name))})")
        if task not in named.manifest.tasks:
            raise WrongTask(f"model {name} cannot do {task}; it does {', '.join(named.manifest.tasks)}")
        return named
