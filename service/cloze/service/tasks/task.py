"""The definition of a task. Every other task module of the package defines one as its `TASK`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from cloze.model_store import Bundle, Manifest
from cloze.model_store.batch import Encoding, HeadOutputs
from cloze.model_store.embedding_space import VectorRecipe, own_recipe
from cloze.model_store.heads import HEADS, Head
from cloze.model_store.heads.label_sets import LabelSet, LabelSets
from cloze.model_store.manifest import Role
from cloze.service.core import Float32
from cloze.service.errors import (
    EmptyRequest,
    InvalidRequest,
    Location,
    TextTooLong,
    TooMany,
    WrongTask,
    quoted,
)
from cloze.service.tasks.label_vectors import LabelCache, LabelVectors
from cloze.service.tasks.wire import WireModel
from cloze.service.text.tokenizer import Tokenizer

INPUTS = Location(("inputs",))
"""The place of a call's inputs, as the native protocol names it."""

ScoreKind = Literal["probability", "log-probability", "raw score", "cosine", "maxsim"]
"""What the scores of an answer are."""

UP_TO: Final = "up to "
"""Leads the message of an error of all texts up to a place: "up to inputs[3] the windows hold"."""

Outputs = Sequence[HeadOutputs]
"""The results of the heads for each encoding of a request."""

T = TypeVar("T")
S = TypeVar("S")

_SHOWN_TOKENS: Final = 16
"""Tokens of a text whose decoding takes about as long as the rest of its prediction."""

Input = tuple[Location, T]
"""The place of an input of a call, ``inputs`` or ``inputs[3]``, and the input."""


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The limits of one request. Each check raises `InvalidRequest`, or `EmptyRequest`."""

    max_tokens: int  # most tokens per sequence, special tokens included; the model's limit
    max_masks: int  # most mask tokens per text
    max_top_k: int  # most predictions per mask, or answers per question
    max_results: int  # most predictions, or answers
    max_request_tokens: int  # most tokens, including all windows of long texts
    max_text_characters: int  # most characters per text, before truncation
    max_request_texts: int = 2048  # most texts

    def checked(
        self,
        values: Any,
        at: Location = INPUTS,
        kind: str = "text",
        others: int = 0,
        *,
        may_be_empty: bool = False,
    ) -> list[Input[Any]]:
        """Return one value or a list of values, each with its place; check their number and texts.

        A list of token ids is one value: ``["a", [5, 6]]`` has values at ``inputs[0]`` and
        ``inputs[1]``. Errors call a value by its kind. Others are texts of the request besides.
        """
        if not isinstance(values, list) or (values and isinstance(values[0], int)):
            located = [(at, values)]
        else:
            if not values:
                raise EmptyRequest(f"is an empty list; it needs at least 1 {kind}", at)
            if (count := len(values)) + others > (most := self.max_request_texts):
                more = f", and the request {others} more" if others else ""
                raise TooMany(f"has {count} {kind}s{more}; the limit is {most}", at)
            located = [(at.below(index), value) for index, value in enumerate(values)]
        for place, text in located:
            if not isinstance(text, str):
                continue
            if not text and not may_be_empty:
                raise EmptyRequest("is empty; it needs at least 1 character", place)
            if len(text) > (most := self.max_text_characters):
                raise TextTooLong(f"has {len(text)} characters; the limit is {most}", place)
        return located

    def check_tokens(self, tokens: int, use: str, at: Location) -> None:
        """Check the tokens of the texts up to a place; the use is like ``the windows hold``."""
        if tokens > (most := self.max_request_tokens):
            problem = f"{use} {tokens} tokens; the limit of a request is {most}"
            raise TooMany(problem, at, UP_TO)

    def check_results(self, results: int, asked: str, kind: str = "predictions") -> None:
        """Check the number of a request's results, or of the encodings that it needs."""
        if results > (most := self.max_results):
            raise TooMany(f"{asked} {results} {kind}; the limit is {most}")


@dataclass(frozen=True)
class TaskContext:
    """The model and the limits of a task call.

    Attributes:
        labels: the vectors of labels; None: the model is no bi-encoder.
        client: whose vectors of labels a call may read; see `LabelCache`.
    """

    manifest: Manifest
    tokenizer: Tokenizer
    limits: TaskLimits
    labels: LabelCache | None = None
    client: str = ""

    @classmethod
    def of(
        cls, bundle: Bundle, limits: TaskLimits, tokenizer: Tokenizer | None = None
    ) -> "TaskContext":
        """Return the context of a bundle, with its own tokenizer unless one is given."""
        labels = None
        if (encoder := bundle.label_encoder) is not None:
            labels = LabelCache(encoder.manifest, Tokenizer(encoder))
        return cls(bundle.manifest, tokenizer or Tokenizer(bundle), limits, labels)

    @cached_property
    def own_vectors(self) -> VectorRecipe | None:
        """The recipe of a request without parameters; None if the model does not embed."""
        return own_recipe(self.manifest)

    @cached_property
    def default_prompt(self) -> str:
        """The text before each text of such a request; often ""."""
        return self.own_vectors.prompt if self.own_vectors else ""

    def check_head(self, head: Head, need: str) -> None:
        """Raise `WrongTask`, which begins with the need, unless the model has a head.

        A need is, for example, ``spans need vectors of tokens``.
        """
        if head.name not in {graph_head.name for graph_head in self.manifest.graph_heads}:
            reference = self.manifest.reference
            raise WrongTask(f"{need}; export {reference} with --task {head.task} too")

    def label_set(self, head: Head, name: str | None) -> tuple[LabelSet, slice]:
        """Return the named label set of a classifier, and its logits; None: the first set."""
        options = self.manifest.heads[head.name]
        assert isinstance(options, LabelSets)
        try:
            return options.choose(name)
        except KeyError:
            known = ", ".join(filter(None, options.names))[:200] or "none"
            reference = self.manifest.reference
            problem = f"{quoted(name or '')} is not one of the label sets of {reference} ({known})"
            raise InvalidRequest(problem, Location(("label_set",))) from None

    def prompt(self, name: str | None) -> str:
        """Return the prompt to put before each text: the named one, or the model's default."""
        if not name:
            return self.default_prompt
        options = self.manifest.embedding
        prompts = options.prompts if options else {}
        if name not in prompts:
            known = ", ".join(map(ascii, prompts)) or "none"
            problem = f"{quoted(name)} is not one of the model's prompts ({known})"
            raise InvalidRequest(problem, Location(("prompt_name",)))
        return prompts[name]

    def first_prompt(self, names: Sequence[str]) -> str | None:
        """Return the model's own name of its first prompt that has one of the names, in any case.

        None if the model has no such prompt.
        """
        options = self.manifest.embedding
        own = {name.lower(): name for name in options.prompts} if options and names else {}
        return next((own[name] for name in names if name in own), None)

    def prompt_of(self, role: Role) -> str:
        """Return the prompt of a role; see `Embedding.prompt_of`."""
        options = self.manifest.embedding
        return self.prompt(options.prompt_of(role) if options else None)


@dataclass(slots=True)  # not frozen: every request makes one; see `Submission`
class TextUsage:
    """How much of one input the model read.

    Attributes:
        tokens: tokens of the whole input, special tokens included.
        used: how many of them the model read.
        windows: (start, end) of each window in characters; null if the input was not divided.
    """

    tokens: int
    used: int
    windows: list[tuple[int, int]] | None = None


class PreparedRequest(NamedTuple, Generic[S]):
    """A tokenized request."""

    encodings: list[Encoding]  # the encodings to run; without any, `Task.decode` follows at once
    state: S  # the values that `Task.decode` needs besides the outputs
    truncated: int = 0  # number of the request's texts that were cut
    warnings: tuple[str, ...] = ()  # messages for the client, in ASCII
    # How much of each input was used; None unless the client asks.
    usage: Sequence[TextUsage] | None = None
    # (outputs, context) -> the next round of the engine, or None if `Task.decode` follows; None if
    # there is one round.
    advance: "Advance | None" = None
    texts: int = 1  # number of texts, pairs or questions of the request
    # How the result's vectors are made; None: the result has no vectors.
    vectors: VectorRecipe | None = None
    # Rows of the answer besides those of the heads' results, such as one per token of `/tokenize`.
    others: int = 0
    # Vectors that the encodings need, some of which may be missing.
    labels: LabelVectors | None = None

    @property
    def answer_rows(self) -> int:
        """The rows that the answer is made of; decoding one takes up to 10 us.

        A row is one vector, one label or one prediction. It counts once per 16 tokens of its
        sequence, whose text may be shown with the row: 3 predictions for the mask of a text of 320
        tokens are 3 x 20 = 60 rows.
        """
        rows = self.others
        for encoding in self.encodings:
            tokens = len(encoding)
            for name, asked in encoding.requests.items():
                head = HEADS[name]
                own = 1 if head.rows is None else head.rows(asked)
                rows += tokens if head.per_token else own * max(1, tokens // _SHOWN_TOKENS)
        return rows


Advance = Callable[[Outputs, TaskContext], PreparedRequest[Any] | None]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A task that clients can request.

    Attributes:
        name: name of the task in `/info`, metric labels and messages.
        route: path of the task in the native protocol.
        summary: one line for the documentation.
        heads: names of the heads that a model needs for the task.
        other_heads: names of heads, each of which serves the task too, without `heads`.
        inputs: the type of a call's inputs: one input, a list of inputs, or either.
        parameters: the model of a call's parameters; every field has a default.
        result: the type of the value that `decode` returns, for the documentation.
        prepare: (inputs, parameters, context) -> the tokenized request. An error of the request is
            `EmptyRequest` for a text or a list without elements, `WrongTask` for what the model
            cannot do, and `InvalidRequest` for all else.
        decode: (state of the request, outputs, context) -> the results, one per input unless the
            inputs are one object that asks for several: JSON values and frozen dataclasses, or if
            `vectors` is set, a float32 array [n, D] or a list of such arrays.
        examples: title -> body of a request of the native protocol, which runs on any model that
            serves the task.
        alone: types of inputs that clients may send without a list; `decode` then returns a list
            of one result, and the native protocol writes the result without the list.
        needs_thread: parameters -> whether even a short body is tokenized and decoded on a thread.
        scores: (manifest, parameters) -> what the scores in the results are; None: the results
            have no scores.
        labels: (manifest, parameters) -> the labels of each input in the model's order; None: the
            results are not the scores of all labels.
        vectors: whether clients may request the result as bytes.
        own_fields, own_parameters: fields of inputs, and parameters, that only this task has, by
            which ``POST /`` recognises the task.
        why_not_served: manifest of a bundle with the heads -> what else the bundle lacks, such as
            a label of entailment; None if it serves the task.
    """

    name: str
    route: str
    summary: str
    heads: tuple[str, ...]
    inputs: Any
    parameters: type[WireModel]
    result: Any
    prepare: Callable[[Any, Any, TaskContext], PreparedRequest[Any]]
    decode: Callable[[Any, Outputs, TaskContext], Any]
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alone: tuple[type, ...] = ()
    needs_thread: Callable[[Any], bool] = lambda _: False
    scores: Callable[[Manifest, Any], ScoreKind | None] = lambda *_: None
    labels: Callable[[Manifest, Any], Sequence[str]] | None = None
    vectors: bool = False
    own_fields: tuple[str, ...] = ()
    own_parameters: tuple[str, ...] = ()
    why_not_served: Callable[[Manifest], str | None] = lambda _: None
    other_heads: tuple[str, ...] = ()

    def has_heads(self, manifest: Manifest) -> bool:
        """Return whether a bundle has the heads that the task needs."""
        names = {head.name for head in manifest.graph_heads}
        return names.issuperset(self.heads) or not names.isdisjoint(self.other_heads)

    def is_served_by(self, manifest: Manifest) -> bool:
        """Return whether a bundle does the task."""
        return self.has_heads(manifest) and self.why_not_served(manifest) is None


def check_has_tokens(ids: Sequence[int], at: Location) -> None:
    """Raise `InvalidRequest` for a text without a token."""
    if not ids:
        raise InvalidRequest("has no token, only spaces or control characters", at)


def softmax(logits: Float32) -> Float32:
    """Return the probabilities of each row of logits [..., L]."""
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)  # type: ignore[no-any-return]
