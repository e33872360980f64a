"""Texts to encodings: the parameters that tasks share, prompts, token ids, pairs, long texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field

from cloze.model_store.batch import Encoding
from cloze.model_store.embedding_space import VectorRecipe
from cloze.model_store.heads import HeadRequest, embedding
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.manifest import Role
from cloze.model_store.sequences import TEXT_TOKENS, Side
from cloze.service.errors import EmptyRequest, InvalidRequest, Location, TextTooLong, quoted
from cloze.service.tasks.task import Input, PreparedRequest, TaskContext, TextUsage
from cloze.service.tasks.wire import NotEmpty, Text, TokenIds, WireModel
from cloze.service.text.tokenizer import Spans, Tokenizer

LongText = Literal["error", "truncate", "window"]

TextsOrIds = Text | TokenIds | Annotated[list[Text | TokenIds], NotEmpty]

EmbedInputs = Annotated[TextsOrIds, Field(description="a text, its token ids, or a list of either")]

_JINA_SEARCHES: Final = (
    "retrieval", "code", "nl2code", "code2code", "code2nl", "code2completion", "qa",
)  # fmt: skip

ROLE_WORDS: Final[Mapping[str, Role]] = {
    "query": Role.QUERY,
    "document": Role.DOCUMENT,
    "search_query": Role.QUERY,
    "search_document": Role.DOCUMENT,
    "passage": Role.DOCUMENT,
    **{f"{search}.query": Role.QUERY for search in _JINA_SEARCHES},
    **{f"{search}.passage": Role.DOCUMENT for search in _JINA_SEARCHES},
}
"""The words for roles: ours, which are Voyage's too, Cohere's, NVIDIA's, and Jina's."""

TASK_PROMPTS: Final[Mapping[str, tuple[str, ...]]] = {
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
    "separation": ("separation", "clustering"),
    "text-matching": ("text-matching", "sts"),
}
"""The words for tasks without roles, of Cohere's and Jina's clients -> names of prompts for them.

A model without such a prompt embeds the texts as without a word.
"""

INPUT_TYPES: Final = (*ROLE_WORDS, *TASK_PROMPTS)
"""All values of ``input_type``."""

Truncate = Literal["NONE", "START", "END"]
"""What to do with a long text, in the words of Cohere's and NVIDIA's clients."""

TRUNCATIONS: Final[Mapping[Truncate | None, dict[str, Any]]] = {
    None: {},  # the model's tokenizer decides which end is cut
    "NONE": {"truncate": False},
    "START": {"truncation_direction": "left"},
    "END": {"truncation_direction": "right"},
}
"""The fields of `TruncationParameters` that the words stand for."""

Bounds = tuple[int, int]
"""The first token of a part of a text, and the token after its last."""

Offsets = list[tuple[int, int] | None]
"""(start, end) of each token in characters of its text; None for special tokens and a prompt's."""

_LEAST_TOKENS: Final = 5
"""Fewest tokens that a request may limit a sequence to; a pair has up to 4 special tokens."""

_TokenCount = Annotated[
    int, Field(json_schema_extra={"anyOf": [{"const": -1}, {"minimum": _LEAST_TOKENS}]})
]

TokenLimit = Annotated[
    _TokenCount | None,
    Field(
        description="vLLM's field: tokens to keep of each text or pair, with the special tokens; "
        "-1 or null keeps as many as the model reads"
    ),
]

S = TypeVar("S")

_LOWER_CASE: Final = BeforeValidator(lambda v: v.lower() if isinstance(v, str) else v)

_OVERLAP: Final = 4
"""Neighbouring windows share this part of a window: a quarter."""


class LongTextRule(NamedTuple):
    """What a request does with its long texts."""

    choice: LongText
    refused_by: str = "long_text is error"  # the parameter that refuses them, for the error
    side: Side | None = None  # the end of a long text to cut; None: the model's
    stride: int | None = None  # tokens that neighbouring windows share; None: a quarter of a window
    report: bool | None = False  # whether to report how much of each text was used
    # Whether windows divide the second text of a pair, which is refused otherwise.
    divides_pairs: bool = False
    # Most tokens of a sequence, with its special tokens; None: as many as the model reads.
    most_tokens: int | None = None

    def check(self, at: Location, tokens: int, most: int, limit: str = "the model reads") -> None:
        """Raise `InvalidRequest` for more tokens than the limit if the rule refuses long texts."""
        if tokens > most and self.choice == "error":
            raise TextTooLong(f"has {tokens} tokens; {limit} {most}, and {self.refused_by}", at)

    def limit(self, max_tokens: int) -> int:
        """Return the most tokens of a sequence, for a model's limit."""
        if (most := self.most_tokens) is None or _LEAST_TOKENS <= most <= max_tokens:
            return max_tokens if most is None else most
        known = f"-1 or {_LEAST_TOKENS} to {max_tokens}, which is what the model reads"
        at = Location(("truncate_prompt_tokens",))
        raise InvalidRequest(f"must be {known}, got {most}", at)


class UsageParameters(WireModel):
    """Whether to report how much of each text was used."""

    return_usage: bool | None = None
    """whether to return {result, usage}: with the result, the tokens of each input, how many of
    them the model read, and its windows; the answer is JSON"""


class TruncationParameters(WireModel):
    """What to do with a text that is too long for the model."""

    truncate: bool | None = None
    """true cuts a long text, false refuses the text; the default is true"""
    truncation_direction: Annotated[Side | None, _LOWER_CASE] = None
    """the end of a long text to cut; the default is the model's, usually right"""
    long_text: LongText | None = None
    """error refuses a long text, truncate cuts it, window divides it and returns the mean over its
    windows, or in /rerank the best of them; the default is truncate"""

    def rule(self, *, report: bool | None = False) -> LongTextRule:
        """Return what to do with long texts, unless the parameters contradict each other."""
        side = self.truncation_direction
        if (choice := self.long_text) is None:
            choice = "error" if self.truncate is False else "truncate"
            return LongTextRule(choice, "truncate is false", side, report=report)
        if self.truncate is not None and choice == ("error" if self.truncate else "truncate"):
            given = str(self.truncate).lower()
            raise InvalidRequest(
                f"truncate {given} contradicts long_text {choice}; leave out one of them"
            )
        return LongTextRule(choice, side=side, report=report)


class PromptTokens(TruncationParameters):
    """vLLM's limit of the tokens of each text or pair, with the special tokens."""

    truncate_prompt_tokens: TokenLimit = None

    def rule(self, *, report: bool | None = False) -> LongTextRule:
        """Return what to do with long texts, which is also what to do beyond the limit."""
        most = self.truncate_prompt_tokens
        return super().rule(report=report)._replace(most_tokens=None if most == -1 else most)


class TextParameters(TruncationParameters, UsageParameters):
    """Request fields that change how a text is tokenized: TEI's and Cloze's own."""

    prompt_name: str | None = None
    """name of a prompt of the model, which is put before each text"""
    input_type: str | None = Field(None, json_schema_extra={"enum": [*INPUT_TYPES, None]})
    """what the texts are for, query or document, which chooses the model's own prompt; the words of
    Cohere's, Jina's, Voyage's and NVIDIA's clients are accepted"""

    def prompt(self, context: TaskContext) -> str:
        """Return the text to put before each text."""
        if self.input_type is None and self.prompt_name is None:
            return context.default_prompt
        if (role := self.role()) is not None:
            return context.prompt_of(role)
        names = TASK_PROMPTS.get(self.input_type or "", ())
        return context.prompt(self.prompt_name or context.first_prompt(names))

    def role(self) -> Role | None:
        """Return the role that ``input_type`` names; None: the request names no role."""
        if self.input_type is None:
            return None
        if self.prompt_name is not None:
            raise InvalidRequest("prompt_name and input_type both choose a prompt; leave out one")
        if self.input_type not in INPUT_TYPES:
            problem = f"{quoted(self.input_type)} is not one of {', '.join(INPUT_TYPES)}"
            raise InvalidRequest(problem, Location(("input_type",)))
        return ROLE_WORDS.get(self.input_type)


class CutTextParameters(TextParameters):
    """The same fields, of tasks that do not divide long texts."""

    long_text: Literal["error", "truncate"] | None = None
    """error refuses a long text, truncate cuts it; the default is truncate"""


class EncodedText(NamedTuple):
    """The encodings of a text or pair, one per window, and how much of the text they have."""

    encodings: Sequence[Encoding]
    usage: TextUsage


@dataclass(slots=True)
class TextEncoder:
    """Builds the encodings of one request, text by text, by the rule for its long texts.

    For example, a model reads 12 tokens per sequence, 2 of which are special tokens. A text of 25
    tokens is longer than the 10 that have room. A request may refuse the text, read its first or
    last 10 tokens, or read the windows (0, 10), (8, 18) and (16, 25), which share a quarter of a
    window.
    """

    rule: LongTextRule
    context: TaskContext
    max_tokens: int
    # What each encoding asks of the heads.
    requests: Mapping[str, HeadRequest] = field(default_factory=dict)
    prompt: str = ""  # the text before each text, unless each has its own
    before: int = 1  # number of tokens before those of a text
    texts: list[EncodedText] = field(default_factory=list)  # the texts and pairs so far
    window_tokens: int = field(default=0, init=False)  # tokens of all windows so far

    @property
    def keep_end(self) -> bool:
        """Whether the start of a long text is cut, and not its end."""
        return (self.rule.side or self.context.tokenizer.truncation_side) == "left"

    def room(self, at: Location, around: int) -> int:
        """Return the most tokens of a text in a sequence that has ``around`` other tokens."""
        if (room := self.max_tokens - around) < 1:
            problem = f"leaves no room for a text beside {around} tokens"
            raise TextTooLong(f"{problem}; the model reads {self.max_tokens}", at)
        return room

    def divide(self, at: Location, tokens: int, around: int = TEXT_TOKENS) -> list[Bounds]:
        """Return the bounds of the parts of a text that the model reads, one per sequence.

        A sequence has ``around`` tokens besides those of the text, such as special tokens.

        Raises:
            InvalidRequest: the text is too long and the rule refuses such texts, or the windows so
                far have more tokens than a request may have.
        """
        room = self.room(at, around)
        if tokens <= room:
            return [(0, tokens)]
        self.rule.check(at, tokens + around, self.max_tokens)
        if self.rule.choice == "truncate":
            return [(tokens - room, tokens) if self.keep_end else (0, room)]
        step = room - (room // _OVERLAP if self.rule.stride is None else self.rule.stride)
        count = 1 - (room - tokens) // step  # rounded up
        self.count(at, count * self.max_tokens)
        firsts = range(0, count * step, step)
        return [(first, min(first + room, tokens)) for first in firsts]

    def count(self, at: Location, tokens: int) -> None:
        """Add tokens to those of all windows; raise `InvalidRequest` above the limit."""
        self.window_tokens += tokens
        self.context.limits.check_tokens(self.window_tokens, "the windows hold", at)

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
        tokenizer, repeated, tokens = self.context.tokenizer, 0, len(ids) + TEXT_TOKENS
        spans: Spans | None = None
        is_short = tokens <= self.max_tokens
        if self.rule.choice == "window" and not is_short:
            if text is not None and (prompt or self.rule.report):
                spans = tokenizer.spans(text)
                prompt_tokens = sum(start < len(prompt) for start in spans.starts)
            repeated = prompt_tokens
        prefix, own = ids[:repeated], ids[repeated:]
        bounds = [(0, len(ids))] if is_short else self.divide(at, len(own), TEXT_TOKENS + repeated)
        encodings = [
            tokenizer.encode([*prefix, *own[first:end]], self.requests) for first, end in bounds
        ]
        windows = None
        if spans is not None:
            read = spans.characters((first + repeated, end + repeated) for first, end in bounds)
            windows = [(start - len(prompt), end - len(prompt)) for start, end in read]
        used = tokens if len(bounds) > 1 else len(encodings[0])
        self.texts.append(EncodedText(encodings, TextUsage(tokens, used, windows)))
        options = self.context.manifest.embedding if prompt else None
        if options and not options.include_prompt and embedding.HEAD.name in self.requests:
            # As in sentence-transformers, the pooling leaves out the start token and as many tokens
            # as the prompt has, also where the prompt is cut. It has the end token.
            for encoding in encodings:
                asked = EmbeddingRequest(min(1 + prompt_tokens, len(encoding) - 1))
                encoding.requests = {**self.requests, embedding.HEAD.name: asked}
        return bounds

    def add_pair(
        self, at: Location, first: Sequence[int], second: Sequence[int], text: str
    ) -> None:
        """Add a pair of texts by their tokens, without special tokens, and by its second text.

        Of a pair that is cut, the longer text is cut first.
        """
        tokenizer, bounds = self.context.tokenizer, [(0, len(second))]
        around = len(first) + tokenizer.special.pair_tokens
        tokens = around + len(second)
        self.rule.check(at, tokens, self.max_tokens)
        if self.rule.choice == "window" and tokens > self.max_tokens:
            if not self.rule.divides_pairs:
                raise TextTooLong(
                    f"is a pair of {tokens} tokens; the model reads {self.max_tokens}, and "
                    "long_text window divides only texts without a pair",
                    at,
                )
            bounds = self.divide(at, len(second), around)
        encodings = [
            tokenizer.pair(
                first, second[start:end], self.max_tokens, self.requests, keep_end=self.keep_end
            )
            for start, end in bounds
        ]
        used = tokens if len(bounds) > 1 else len(encodings[0])
        self.keep(encodings, tokens, used, bounds, text)

    def keep(
        self,
        encodings: Sequence[Encoding],
        tokens: int,
        used: int,
        bounds: Sequence[Bounds] = (),
        text: str = "",
    ) -> None:
        """Add the encodings of the parts of a text; see `TextUsage` for the numbers of tokens."""
        windows = None
        if len(bounds) > 1 and self.rule.report:
            windows = self.context.tokenizer.spans(text).characters(bounds)
        self.texts.append(EncodedText(encodings, TextUsage(tokens, used, windows)))

    def offsets(self, texts: Sequence[Input[str]]) -> list[Offsets]:
        """Return the place of each token of the texts, which have no windows."""
        skipped = len(self.prompt)
        offsets: list[Offsets] = []
        for (_, text), (_, usage) in zip(texts, self.texts, strict=True):
            read = usage.used - self.before - 1
            enough = None if self.keep_end else read
            spans = self.context.tokenizer.spans(self.prompt + text, enough)
            first = len(spans.ids) - read if self.keep_end else 0
            places = spans.part(first, first + read).offsets()
            own = [(a - skipped, b - skipped) if a >= skipped else None for a, b in places]
            offsets.append([*[None] * self.before, *own, None])
        return offsets

    @property
    def tokens(self) -> int:
        """Number of tokens of all encodings."""
        return sum(len(encoding) for text in self.texts for encoding in text.encodings)

    def prepared(self, state: S, vectors: VectorRecipe | None = None) -> PreparedRequest[S]:
        """Return the request with all its encodings; see `PreparedRequest`."""
        usage = [text.usage for text in self.texts]
        return PreparedRequest(
            [encoding for text in self.texts for encoding in text.encodings],
            state,
            truncated=sum([each.used < each.tokens for each in usage]),
            usage=usage if self.rule.report else None,
            texts=len(usage),
            vectors=vectors,
        )


def encode_pairs(
    pairs: Sequence[tuple[Location, str, str | None]],
    rule: LongTextRule,
    context: TaskContext,
    requests: Mapping[str, HeadRequest],
) -> TextEncoder:
    """Return the encodings of pairs of texts, and of texts whose second text is None."""
    texts = list(dict.fromkeys(text for _, *pair in pairs for text in pair if text is not None))
    ids = dict(zip(texts, context.tokenizer.ids(texts), strict=True))  # each text once
    encoder = TextEncoder(rule, context, rule.limit(context.limits.max_tokens), requests)
    for at, first, second in pairs:
        if second is None:
            encoder.add(at, ids[first], first)
        else:
            encoder.add_pair(at, ids[first], ids[second], second)
    return encoder


def encode_texts(
    texts: Sequence[Input[str | list[int]]],
    rule: LongTextRule,
    context: TaskContext,
    requests: Mapping[str, HeadRequest],
    prompt: str = "",
    prompts: Sequence[str] | None = None,
) -> TextEncoder:
    """Return the encodings of texts to embed, or of their token ids.

    All texts have the prompt, unless each has its own.
    """
    options, tokenizer = context.manifest.embedding, context.tokenizer
    max_tokens = options.max_tokens if options else context.limits.max_tokens
    if rule.most_tokens is not None:  # most requests do without the call
        max_tokens = rule.limit(max_tokens)
    prompts = prompts or [prompt] * len(texts)
    encoder = TextEncoder(rule, context, max_tokens, requests, prompt)
    lengths: dict[str, int] = {}
    if options is not None and not options.include_prompt:
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


def centred(middle: int, tokens: int, room: int) -> Bounds:
    """Return the bounds of the part of a text that has a token in its middle, if it can."""
    first = max(0, min(middle - room // 2, tokens - room))
    return first, min(first + room, tokens)
