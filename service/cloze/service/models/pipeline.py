"""The path of a request through the service: tokenize, wait for the engine, decode.

`Pipeline` handles the requests of one served model under one deadline. `Models` chooses the
pipeline of a request. The module depends neither on HTTP nor on a particular task.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from cloze.model_store import Manifest
from cloze.model_store.batch import Encoding
from cloze.model_store.embedding_space import VectorRecipe, embedding_space, own_recipes
from cloze.model_store.heads import HEADS
from cloze.service import errors
from cloze.service.batching.fair_queue import Terms
from cloze.service.clock import CLOCK, Clock
from cloze.service.core import ServedRequest
from cloze.service.models.adapters import AdapterBundle
from cloze.service.models.equal_work import EqualWork
from cloze.service.models.served_models import ServedModel
from cloze.service.settings import Settings
from cloze.service.tasks import Task, TaskContext, TaskLimits
from cloze.service.tasks.label_vectors import LabelVectors
from cloze.service.tasks.task import Outputs
from cloze.service.text.tokenizer import Tokenizer
from cloze.service.threads import run_anywhere, run_on_thread

_INLINE_BYTES = 4_000
"""Shorter requests are tokenized on the event loop.

Tokenizing so few bytes takes at most about 1 ms, less than two thread switches under load.
"""

_INLINE_ROWS = 64
"""Most rows of an answer that is decoded on the event loop; see `PreparedRequest.answer_rows`."""

_REPEATED_BYTES = 65_536
"""A longer request has a large answer: it may repeat texts, and escaping one takes up to 1 ms."""

_SHOWN_NAMES = 30
"""Most names of models in an error."""


def task_limits(settings: Settings, manifest: Manifest) -> TaskLimits:
    """Return the limits of a request to a model."""
    return TaskLimits(
        max_tokens=manifest.limits.max_tokens,
        max_masks=settings.max_masks,
        max_top_k=settings.max_top_k,
        max_results=settings.max_request_results,
        max_request_tokens=settings.max_request_tokens,
        max_text_characters=settings.max_text_characters,
        max_request_texts=settings.max_request_texts,
    )


class Pipeline:
    """Answers the requests of one served model.

    Models with one tokenizer may share it, and all models share the equal work.

    Raises:
        StartupError: the bundle's tokenizer cannot be read.
    """

    def __init__(
        self,
        model: ServedModel,
        limits: TaskLimits,
        tokenizer: Tokenizer | None = None,
        clock: Clock = CLOCK,
        equal_work: EqualWork | None = None,
    ) -> None:
        self.model, self._clock = model, clock
        self._equal_work = equal_work or EqualWork(clock=clock)
        self.manifest: Manifest = model.bundle.manifest
        self.reference = self.manifest.reference
        self.context = TaskContext.of(model.bundle, limits, tokenizer)
        # Naming a space takes 10 us, and most requests have the same recipe.
        self._spaces = lru_cache(128)(
            lambda precision, recipe: recipe and embedding_space(self.manifest, precision, recipe)
        )

    async def run(
        self,
        task: Task,
        inputs: Any,
        parameters: Any,
        request: ServedRequest,
        before_large: Callable[[], Awaitable[None]] | None = None,
    ) -> Any:
        """Tokenize the texts, wait for the engine's outputs, and return the decoded value.

        What else the answer needs is noted in the request, which has a number of texts only if it
        gets a result. The tokens of each round are charged before they wait for the engine.
        Vectors are refused if they are not in the space that the request expects.

        A request of many bytes is tokenized and decoded on a thread, and `before_large` runs before
        a large result is decoded. Cancelling this coroutine drops the encodings that have not run,
        and ends the work of its threads at the next `check_awaited`.

        Raises:
            ServiceError: the request gets no result.
        """
        request.began = self._clock.monotonic()
        inline = request.body_bytes <= _INLINE_BYTES and not task.needs_thread(parameters)
        context = self.context
        if context.labels is not None:
            context = replace(context, client=request.client)
        prepared = await run_anywhere(inline, task.prepare, inputs, parameters, context)
        request.tokenize_s = self._clock.monotonic() - request.began
        if request.expected_space is not None and self.model.precision():
            self._check_space(prepared.vectors, request.expected_space)
        terms = Terms(
            request.deadline,
            request.client,
            request.stated_s,
            request.trace.parent if request.trace is not None else "",
            request.is_bulk,
        )
        if prepared.labels is not None and prepared.labels.missing:
            await self._fill(prepared.labels, terms, request)
        rows, last = 0, prepared
        while True:
            rows += last.answer_rows
            outputs = await self._outputs(self.model, last.encodings, terms, request)
            if last.advance is None:
                break
            following = await run_on_thread(last.advance, outputs, self.context)
            if following is None:
                break
            last, terms = following, terms._replace(later_round=True)
        if request.expected_space is not None:  # an engine that ran has a precision
            self._check_space(prepared.vectors, request.expected_space)
        request.is_large = request.body_bytes > _REPEATED_BYTES or rows > _INLINE_ROWS
        if request.is_large and before_large is not None:
            await before_large()
        inline = inline and not request.is_large
        value = await run_anywhere(inline, task.decode, last.state, outputs, self.context)
        request.texts, request.truncated = prepared.texts, prepared.truncated
        request.warnings, request.usage = prepared.warnings, prepared.usage
        request.embedding_space = self._spaces(self.model.precision(), prepared.vectors)
        return value

    async def _fill(self, labels: LabelVectors, terms: Terms, request: ServedRequest) -> None:
        """Compute the vectors of labels that are missing; the texts wait for them."""
        encoder, cache = self.model.labels, self.context.labels
        assert encoder is not None  # else the bundle was refused
        assert cache is not None
        outputs = await self._outputs(encoder, labels.missing_encodings, terms, request)
        cache.fill(labels, outputs)

    async def _outputs(
        self,
        model: ServedModel,
        encodings: Sequence[Encoding],
        terms: Terms,
        request: ServedRequest,
    ) -> Outputs:
        """Return the outputs of the model, or of its encoder of labels; charge the tokens first."""
        tokens = sum([len(encoding.input_ids) for encoding in encodings])
        request.tokens += tokens
        if request.key is not None:
            request.key.take_tokens(tokens, self._clock.monotonic())
        if not tokens:  # a task without the engine has none
            return []
        part = "texts" if model is self.model else "labels"
        name = f"{self._fingerprint} {part} {model.precision()}"
        batch = await self._equal_work.run(name, model.queue, terms, encodings)
        request.queue_s += batch.queue_s
        request.inference_s += batch.inference_s
        return batch.outputs

    @cached_property
    def _fingerprint(self) -> str:
        """The digests of all files that results depend on."""
        bundle = self.model.bundle
        adapter = bundle.key if isinstance(bundle, AdapterBundle) else ""
        return f"{self.reference} {self.manifest.digest} {adapter}"

    def embedding_space(self, recipe: VectorRecipe | None) -> str | None:
        """Return the name of the space of vectors, on the graph that runs; None for no vectors."""
        return self._spaces(self.model.precision(), recipe)

    def own_spaces(self) -> dict[str, str | None]:
        """Return the names of the spaces of requests without parameters, by task."""
        recipes = own_recipes(self.manifest)
        return {task: self.embedding_space(recipe) for task, recipe in recipes.items()}

    def _check_space(self, recipe: VectorRecipe | None, expected: str) -> None:
        """Raise `OtherEmbeddingSpace` for vectors that are not in the expected space."""
        if recipe is not None and (space := self.embedding_space(recipe)) != expected:
            raise errors.OtherEmbeddingSpace(
                f"the request expects vectors of the embedding space {expected[:80]!a}; those of "
                f"{self.reference} are in {space or 'one that its bundle does not name'}"
            )


class Models:
    """The served models. Chooses the model that answers a request.

    Args:
        pipelines: at least one pipeline; the first that serves a task is the task's default.
        tasks: the tasks that clients may request.
        defaults: task -> the model that is its default instead, NAME or NAME@VERSION.
        aliases: another name of a model -> NAME or NAME@VERSION of the model.

    Attributes:
        tasks_of: the names of the tasks that each model serves.
        names_of: the names of each model: NAME@VERSION, then NAME if the model is the newest
            version, then its aliases.

    Raises:
        StartupError: a default is of no task, or is not served, or does not serve its task; or the
            model of an alias is not served, or a model has the name of an alias.
    """

    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        tasks: Iterable[Task],
        defaults: Mapping[str, str] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.pipelines, self._aliases = tuple(pipelines), aliases or {}
        self._tasks = {task.name: task for task in tasks}
        self._to_whom = ""
        self.within = lru_cache(1024)(self._within)  # each limited API key has a set of models
        self._by_name: dict[str, Pipeline] = {}
        for pipeline in sorted(pipelines, key=lambda pipeline: pipeline.manifest.version):
            # A name without a version stands for the newest version.
            self._by_name[pipeline.manifest.name] = pipeline
            self._by_name[pipeline.manifest.reference] = pipeline
        self._by_name |= self._aliased()
        self.names_of = {pipeline: [pipeline.reference] for pipeline in self.pipelines}
        for name, pipeline in self._by_name.items():
            if name != pipeline.reference:
                self.names_of[pipeline].append(name)
        self._served = {
            name: [p for p in self.pipelines if task.is_served_by(p.manifest)]
            for name, task in self._tasks.items()
        }
        self.tasks_of: dict[Pipeline, list[str]] = {pipeline: [] for pipeline in self.pipelines}
        for name, served in self._served.items():
            for pipeline in served:
                self.tasks_of[pipeline].append(name)
        for name, model in (defaults or {}).items():
            if name not in self._tasks:
                known = ", ".join(self._tasks)
                raise errors.StartupError(f"default: there is no task {name!a} (there: {known})")
            try:
                default = self.choose(self._tasks[name], model)
            except errors.ServiceError as error:
                raise errors.StartupError(f"default of {name}: {error}") from None
            self._served[name].sort(key=lambda pipeline: pipeline is not default)

    def _aliased(self) -> dict[str, Pipeline]:
        """Return the models by their aliases, none of which is the name of a model."""
        aliased = {}
        for alias, name in self._aliases.items():
            if alias in self._by_name:
                raise errors.StartupError(f"alias {alias}: a served model has this name")
            try:
                aliased[alias] = self.named(name)
            except errors.UnknownModel as error:
                raise errors.StartupError(f"alias {alias}: {error}") from None
        return aliased

    def _within(self, names: frozenset[str]) -> "Models":
        """Return only the models of these names, NAME or NAME@VERSION, in the order of these."""
        chosen = [p for p in self.pipelines if not names.isdisjoint((p.manifest.name, p.reference))]
        of_chosen = {name for p in chosen for name in (p.manifest.name, p.reference)}
        aliases = {alias: name for alias, name in self._aliases.items() if name in of_chosen}
        view = Models(chosen, self._tasks.values(), aliases=aliases)
        view._to_whom = " to this key"
        for task, served in self._served.items():  # the defaults stay first
            view._served[task] = [pipeline for pipeline in served if pipeline in view.tasks_of]
        return view

    def serving(self, task: Task) -> Sequence[Pipeline]:
        """Return the pipelines of the models that serve a task, the default first.

        There are none if the server does not offer the task.
        """
        return self._served.get(task.name, ())

    def default(self, task: Task) -> Pipeline | None:
        """Return the pipeline for requests that name no model; None if no model serves the task."""
        return next(iter(self.serving(task)), None)

    def named(self, name: str) -> Pipeline:
        """Return the pipeline of a model, by ``NAME``, ``NAME@VERSION`` or an alias.

        Ollama's clients may add ``:latest`` to a name.

        Raises:
            UnknownModel: no model of that name is served.
        """
        named = self._by_name.get(name) or self._by_name.get(name.removesuffix(":latest"))
        if named is None:
            names = sorted(self._by_name)
            served = ", ".join(names[:_SHOWN_NAMES])
            if len(names) > _SHOWN_NAMES:
                served += f" and {len(names) - _SHOWN_NAMES} more; GET /v1/models has all"
            raise errors.UnknownModel(
                f"no model {errors.quoted(name)} is served{self._to_whom} (there: {served})"
            )
        return named

    def choose(
        self, task: Task, name: str | None, serving: Sequence[Pipeline] | None = None
    ) -> Pipeline:
        """Return the pipeline of the named model, or the task's default.

        Args:
            task: the task to serve.
            name: ``NAME``, ``NAME@VERSION`` or an alias; None selects the task's default.
            serving: the pipelines to choose from, the default first; None: those of the task.

        Raises:
            UnknownModel: no model of that name is served.
            WrongTask: the model lacks a head for the task, or no served model has one.
        """
        serving = self.serving(task) if serving is None else serving
        if name is None:
            if not serving:
                if reason := self._missing(task, self.pipelines):
                    raise errors.WrongTask(f"no served model can do {task.name}: {reason}")
                if self._to_whom:
                    raise errors.WrongTask(
                        f"no model that is served{self._to_whom} can do {task.name}"
                    )
                wanted = "".join(f" --task {HEADS[head].task}" for head in task.heads)
                raise errors.WrongTask(
                    f"no served model can do {task.name}; export one from a checkpoint that has "
                    f"the head: cloze export CHECKPOINT --name NAME{wanted}, and then cloze serve"
                )
            return serving[0]
        named = self.named(name)
        if named not in serving:
            reason = self._missing(task, [named])
            raise errors.WrongTask(
                f"model {name} cannot do {task.name}"
                + (f": {reason}" if reason else f"; it does {', '.join(self.tasks_of[named])}")
            )
        return named

    @staticmethod
    def _missing(task: Task, pipelines: Iterable[Pipeline]) -> str:
        """Return why models with the heads of a task do not do it; "" if there is none."""
        for pipeline in pipelines:
            manifest = pipeline.manifest
            if task.has_heads(manifest) and (reason := task.why_not_served(manifest)):
                return f"{pipeline.reference} classifies, but {reason}"
        return ""
