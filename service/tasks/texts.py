"""Texts to encodings: prompts, token ids, and long texts that are refused, cut or divided."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field

from cloze.model_store.batch import Encoding
from cloze.model_store.embedding_space import VectorRecipe
from cloze.model_store.heads import HeadRequest, embedding
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.manifest import Role
from cloze.model_store.sequences import Side
from cloze.service.core import EmptyRequest, InvalidRequest, Location, quoted
from cloze.service.tasks.task import (
    Input,
    NotEmpty,
    PreparedRequest,
    TaskContext,
    Text,
    TextUsage,
    TokenIds,
    WireModel,
)
from cloze.service.tokenizer import Tokenizer

LongText = Literal["error", "truncate", "window"]

Bounds = tuple[int, int]
"""The first token of a window, and the token after its last."""

TextsOrIds = Text | TokenIds | Annotated[list[Text | TokenIds], NotEmpty]

EmbedInputs = Annotated[TextsOrIds, Field(description="a text, its token ids, or a list of either")]

Offsets = list[tuple[int, int] | None]
"""(start, end) of each token in characters of its text; None for special tokens and a prompt's."""

S = TypeVar("S")

ROLE_WORDS: Final[Mapping[str, Role]] = {
    "query": Role.QUERY,
    "document": Role.DOCUMENT,
    "search_query": Role.QUERY,
    "search_document": Role.DOCUMENT,
    "retrieval.query": Role.QUERY,
    "retrieval.passage": Role.DOCUMENT,
    "passage": Role.DOCUMENT,
}
"""The words for roles: ours, which are Voyage's too, Cohere's, Jina's, and NVIDIA's."""

Truncate = Literal["NONE", "START", "END"]
"""What to do with a long text, in the words of Cohere's and NVIDIA's clients."""

_OVERLAP: Final = 4
"""Neighbouring windows share this part of a window: a quarter."""


# ---- parameters ----------------------------------------------------------------------------------


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class UsageParameters(WireModel):
    """Whether to report how much of each text was used."""

    return_usage: bool | None = Field(
        None,
        description="whether to return {result, usage}: with the result, the tokens of each input, "
        "how many of them the model read, and its windows; the answer is JSON",
    )


class TruncationParameters(WireModel):
    """What to do with a text that is too long for the model."""

    truncate: bool | None = Field(
        None, description="true cuts a long text, false refuses the text; the default is true"
    )
    truncation_direction: Annotated[Literal["left", "right"] | None, BeforeValidator(_lower)] = (
        Field(
            None,
            description="the end of a long text to cut; the default is the model's, usually right",
        )
    )
    long_text: Literal["error", "truncate"] | None = Field(
        None, description="error refuses a long text, truncate cuts it; the default is truncate"
    )

    def rule(self, *, report: bool | None = False) -> "LongTextRule":
        """Return what to do with long texts.

        Raises:
            InvalidRequest: ``truncate`` and ``long_text`` contradict each other.
        """
        side = self.truncation_direction
        choice: LongText | None = self.long_text
        if choice is None:
            choice = "error" if self.truncate is False else "truncate"
            return LongTextRule(choice, "truncate is false", side, report=report)
        if self.truncate is not None and choice == ("error" if self.truncate else "truncate"):
            given = str(self.truncate).lower()
            raise InvalidRequest(
                f"truncate {given} contradicts long_text {choice}; leave out one of them"
            )
        return LongTextRule(choice, side=side, report=report)


def truncation_of(word: Truncate | None) -> dict[str, Any]:
    """Return the parameters of truncation that a word of other clients stands for.

    Without a word, the model's tokenizer decides which end is cut.
    """
    match word:
        case "NONE":
            return {"truncate": False}
        case "START":
            return {"truncation_direction": "left"}
        case "END":
            return {"truncation_direction": "right"}
    return {}


class TextParameters(TruncationParameters, UsageParameters):
    """How a text becomes a sequence: the fields of text-embeddings-inference, and our own."""

    prompt_name: str | None = Field(
        None, description="name of a prompt of the model, which is put before each text"
    )
    input_type: str | None = Field(
        None,
        description="what the texts are for, query or document, which chooses the model's own "
        "prompt; Cohere's, Jina's, Voyage's and NVIDIA's words for these are accepted",
        json_schema_extra={"enum": [*ROLE_WORDS, None]},
    )

    def prompt(self, context: TaskContext) -> str:
        """Return the text to put before each text.

        Raises:
            InvalidRequest: the model has no such prompt, or there is no such type of input.
        """
        if self.input_type is None:
            return context.prompt(self.prompt_name)
        role = self.role()
        assert role is not None
        return context.prompt_of(role)

    def role(self) -> Role | None:
        """Return the role that ``input_type`` names; None: the request has no ``input_type``.

        Raises:
            InvalidRequest: there is no such type of input, or the request names a prompt too.
        """
        if self.input_type is None:
            return None
        if self.prompt_name is not None:
            raise InvalidRequest("prompt_name and input_type both choose a prompt; leave out one")
        if (role := ROLE_WORDS.get(self.input_type)) is None:
            known = ", ".join(ROLE_WORDS)
            problem = f"{quoted(self.input_type)} is not one of {known}"
            raise InvalidRequest(problem, Location(("input_type",)))
        return role


# ---- encodings -----------------------------------------------------------------------------------


class LongTextRule(NamedTuple):
    """What a request does with its long texts.

    Attributes:
        choice: whether to refuse, cut or divide them.
        refused_by: the parameter that refuses them, for the error.
        side: the end of a long text to cut; None: the model's.
        stride: tokens that neighbouring windows share; None: a quarter of a window.
        divides_pairs: whether windows divide the second text of a pair, which is refused otherwise.
        report: whether to report how much of each text was used.
    """

    choice: LongText
    refused_by: str = "long_text is error"
    side: Side | None = None
    stride: int | None = None
    report: bool | None = False
    divides_pairs: bool = False

    def check(self, at: Location, tokens: int, most: int) -> None:
        """Raise `InvalidRequest` for a text of more tokens than the model reads, if asked to."""
        if self.choice == "error":
            raise InvalidRequest(
                f"has {tokens} tokens; the model reads {most}, and {self.refused_by}", at
            )


@dataclass(slots=True)
class TextEncoder:
    """Builds the encodings of one request, text by text.

    A text raises `InvalidRequest` if it is too long and the rule refuses such texts, or if the
    windows so far have more tokens than a request may have.

    Attributes:
        max_tokens: most tokens per encoding, special tokens included.
        requests: what each encoding asks of the heads; None: each has its own requests.
        encodings: one per text or pair, or one per window of a text.
        windows: number of encodings of each text or pair.
        usage: how much of each text or pair the encodings have.
        window_tokens: tokens of all windows so far.
    """

    rule: LongTextRule
    context: TaskContext
    max_tokens: int
    requests: Mapping[str, HeadRequest] | None = None
    encodings: list[Encoding] = field(default_factory=list)
    windows: list[int] = field(default_factory=list)
    usage: list[TextUsage] = field(default_factory=list)
    window_tokens: int = 0

    @property
    def keep_end(self) -> bool:
        """Whether the start of a long text is cut, and not its end."""
        return (self.rule.side or self.context.tokenizer.truncation_side) == "left"

    def add(
        self,
        at: Location,
        ids: Sequence[int],
        text: str | None,
        prompt: str = "",
        prompt_tokens: int = 0,
    ) -> Sequence[Bounds]:
        """Add a text; return the (first, end) tokens of each of its encodings.

        The ids are without special tokens. The prompt is the start of the text, which each window
        repeats. The text is None if the client sent its ids, which then begin with the prompt's.
        `prompt_tokens` is the number of tokens of the prompt alone; a text needs it only if the
        pooling leaves out prompts.
        """
        if self.rule.choice == "window" and len(ids) + 2 > self.max_tokens:
            return self._add_windows(at, ids, text, prompt, prompt_tokens)
        tokenizer = self.context.tokenizer
        encoding = tokenizer.encode(ids, self.max_tokens, keep_end=self.keep_end)
        usage = TextUsage(len(ids) + 2, len(encoding))
        self.add_encodings(at, [encoding], usage)
        cut = usage.tokens - usage.used if self.keep_end else 0
        if prompt:
            self._leave_out(1, prompt_tokens)
        return [(cut, cut + len(encoding) - 2)]

    def _add_windows(
        self, at: Location, ids: Sequence[int], text: str | None, prompt: str, prompt_tokens: int
    ) -> Sequence[Bounds]:
        """Add the windows of a text; each begins with the prompt's tokens. See `add`."""
        tokenizer = self.context.tokenizer
        needs_places = text is not None and (prompt or self.rule.report)
        places = tokenizer.spans(text or "").offsets if needs_places else []
        if text is not None:
            prompt_tokens = sum(start < len(prompt) for start, _ in places)
        prefix = ids[:prompt_tokens]
        own, room = ids[len(prefix) :], self.max_tokens - 2 - len(prefix)
        if room < 1:
            raise InvalidRequest(
                f"the prompt of {len(prefix)} tokens leaves no room; "
                f"the model reads {self.max_tokens}"
            )
        bounds = self.divide(len(own), room, at, self.rule.stride)
        encodings = [
            tokenizer.encode([*prefix, *own[first:end]], self.max_tokens) for first, end in bounds
        ]
        windows = None
        if places:
            read = characters(bounds, places[len(prefix) :])
            windows = [(start - len(prompt), end - len(prompt)) for start, end in read]
        self.add_encodings(at, encodings, TextUsage(len(ids) + 2, len(ids) + 2, windows))
        if prompt:
            self._leave_out(len(encodings), prompt_tokens)
        return bounds

    def _leave_out(self, encodings: int, prompt_tokens: int) -> None:
        """Leave the prompt out of the pooling of the last encodings, if the model does so.

        The start token is left out too, and the end token is not. As in sentence-transformers, as
        many tokens are left out where the start of the text, with its prompt, is cut.
        """
        recipe, asked = self.context.manifest.embedding, self.requests
        if recipe is None or recipe.include_prompt or not asked or embedding.HEAD.name not in asked:
            return
        for encoding in self.encodings[-encodings:]:
            first = min(1 + prompt_tokens, len(encoding) - 1)
            encoding.requests = {**asked, embedding.HEAD.name: EmbeddingRequest(first)}

    def add_pair(
        self, at: Location, first: Sequence[int], second: Sequence[int], text: str
    ) -> None:
        """Add a pair of texts by their tokens, without special tokens, and by its second text."""
        tokenizer = self.context.tokenizer
        tokens = len(first) + len(second) + tokenizer.special.pair_tokens
        if self.rule.choice == "window" and tokens > self.max_tokens:
            if self.rule.divides_pairs:
                self._add_pair_windows(at, first, second, text)
                return
            raise InvalidRequest(
                f"is a pair of {tokens} tokens; the model reads {self.max_tokens}, and long_text "
                "window divides only texts without a pair",
                at,
            )
        encoding = tokenizer.pair(first, second, self.max_tokens, keep_end=self.keep_end)
        self.add_encodings(at, [encoding], TextUsage(tokens, len(encoding)))

    def _add_pair_windows(
        self, at: Location, first: Sequence[int], second: Sequence[int], text: str
    ) -> None:
        """Add a pair for each window of its second text. See `add_pair`."""
        tokenizer, around = self.context.tokenizer, len(first)
        around += tokenizer.special.pair_tokens
        if (room := self.max_tokens - around) < 1:
            problem = f"has no room beside the {len(first)} tokens of the query"
            raise InvalidRequest(f"{problem}; the model reads {self.max_tokens} tokens", at)
        bounds = self.divide(len(second), room, at, self.rule.stride, around)
        encodings = [tokenizer.pair(first, second[a:b], self.max_tokens) for a, b in bounds]
        windows = characters(bounds, tokenizer.spans(text).offsets) if self.rule.report else None
        tokens = around + len(second)
        self.add_encodings(at, encodings, TextUsage(tokens, tokens, windows))

    def add_encodings(self, at: Location, encodings: Sequence[Encoding], usage: TextUsage) -> None:
        """Add the encodings of one text or pair."""
        if usage.used < usage.tokens:
            self.rule.check(at, usage.tokens, self.max_tokens)
        if self.requests is not None:
            for encoding in encodings:
                encoding.requests = self.requests
        self.encodings += encodings
        self.windows.append(len(encodings))
        self.usage.append(usage)

    def divide(
        self, tokens: int, room: int, at: Location, stride: int | None = None, around: int = 2
    ) -> list[Bounds]:
        """Return the bounds of a text's windows, of at most ``room`` of its tokens each.

        Neighbouring windows share ``stride`` tokens, by default a quarter. A window has ``around``
        tokens besides those of the text.
        """
        step = room - (room // _OVERLAP if stride is None else stride)
        count = 1 + max(0, -(-(tokens - room) // step))
        self.window_tokens += count * (room + around)
        self.context.limits.check_tokens(self.window_tokens, "the windows hold", at)
        firsts = range(0, count * step, step)
        return [(first, min(first + room, tokens)) for first in firsts]

    def prepared(self, state: S, vectors: VectorRecipe | None = None) -> PreparedRequest[S]:
        """Return the request with all its encodings; see `PreparedRequest`."""
        return PreparedRequest(
            self.encodings,
            state,
            truncated=sum([usage.used < usage.tokens for usage in self.usage]),
            usage=self.usage if self.rule.report else None,
            texts=len(self.windows),
            vectors=vectors,
        )


def characters(
    bounds: Sequence[Bounds], offsets: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the (start, end) characters of windows, by the characters of each token."""
    return [(offsets[first][0], offsets[end - 1][1]) for first, end in bounds]


def encode_pairs(
    pairs: Sequence[tuple[Location, str, str | None]],
    rule: LongTextRule,
    context: TaskContext,
    requests: Mapping[str, HeadRequest],
) -> TextEncoder:
    """Return the encodings of pairs of texts, and of texts whose second text is None."""
    texts = list(dict.fromkeys(text for _, *pair in pairs for text in pair if text is not None))
    ids = dict(zip(texts, context.tokenizer.ids(texts), strict=True))  # each text once
    encoder = TextEncoder(rule, context, context.limits.max_tokens, requests)
    for at, first, second in pairs:
        if second is None:
            encoder.add(at, ids[first], first)
        else:
            encoder.add_pair(at, ids[first], ids[second], second)
    return encoder


# ---- texts to embed ------------------------------------------------------------------------------


def encode_texts(
    texts: Sequence[Input[str | list[int]]],
    parameters: TextParameters,
    context: TaskContext,
    requests: Mapping[str, HeadRequest] | None,
    prompts: Sequence[str] | None = None,
) -> TextEncoder:
    """Return the encodings of texts to embed, or of their token ids; see `listed`.

    Each text has its own prompt; without prompts, all have that of the parameters.
    """
    recipe, tokenizer = context.manifest.embedding, context.tokenizer
    max_tokens = recipe.max_tokens if recipe else context.limits.max_tokens
    if prompts is None:
        prompts = [parameters.prompt(context)] * len(texts)
    rule = parameters.rule(report=parameters.return_usage)
    encoder = TextEncoder(rule, context, max_tokens, requests)
    lengths: dict[str, int] = {}
    if recipe is not None and not recipe.include_prompt:
        lengths = {prompt: len(tokenizer.ids([prompt])[0]) for prompt in {*prompts}}
    prompted = zip(prompts, texts, strict=True)
    ids = iter(tokenizer.ids([prompt + t for prompt, (_, t) in prompted if isinstance(t, str)]))
    for prompt, (at, text) in zip(prompts, texts, strict=True):
        if isinstance(text, str):
            encoder.add(at, next(ids), prompt + text, prompt, lengths.get(prompt, 0))
        else:
            [before] = tokenizer.ids([prompt]) if prompt else [[]]
            sent = own_ids(text, at, tokenizer)
            encoder.add(at, [*before, *sent], None, prompt, len(before))
    return encoder


def own_ids(ids: list[int], at: Location, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids that a client sent, without ``[CLS]`` and ``[SEP]`` around them."""
    if not ids:
        raise EmptyRequest("is empty; it needs at least 1 token id", at)
    if not (min(ids) >= 0 and max(ids) < tokenizer.vocab_size):
        known = f"this model's are 0 to {tokenizer.vocab_size - 1}"
        raise InvalidRequest(f"has token ids from {min(ids)} to {max(ids)}; {known}", at)
    special = tokenizer.special
    is_wrapped = len(ids) >= 2 and ids[0] == special.cls and ids[-1] == special.sep
    return ids[1:-1] if is_wrapped else ids


def offsets(
    texts: Sequence[Input[str]], encoder: TextEncoder, parameters: TextParameters
) -> list[Offsets]:
    """Return the place of each token of the texts' encodings, which `encode_texts` made."""
    prompt = parameters.prompt(encoder.context)
    skipped = len(prompt)
    places: list[Offsets] = []
    for (_, text), encoding in zip(texts, encoder.encodings, strict=True):
        read = len(encoding) - 2
        enough = None if encoder.keep_end else read
        places_of_text = encoder.context.tokenizer.spans(prompt + text, enough).offsets
        first = len(places_of_text) - read if encoder.keep_end else 0
        kept = places_of_text[first : first + read]
        own = [(a - skipped, b - skipped) if a >= skipped else None for a, b in kept]
        places.append([None, *own, None])
    return places
