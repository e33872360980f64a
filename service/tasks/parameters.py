"""The parameters that several tasks share: what to do with long texts, prompts, and usage."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from cloze.model_store.manifest import Role
from cloze.model_store.sequences import Side
from cloze.service.core import InvalidRequest, Location, quoted
from cloze.service.tasks.task import TaskContext
from cloze.service.tasks.wire import NotEmpty, Text, TokenIds, WireModel

LongText = Literal["error", "truncate", "window"]

TextsOrIds = Text | TokenIds | Annotated[list[Text | TokenIds], NotEmpty]

EmbedInputs = Annotated[TextsOrIds, Field(description="a text, its token ids, or a list of either")]

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

    def check(self, at: Location, tokens: int, most: int, limit: str = "the model reads") -> None:
        """Raise `InvalidRequest` for more tokens than the limit if the rule refuses long texts."""
        if tokens > most and self.choice == "error":
            raise InvalidRequest(f"has {tokens} tokens; {limit} {most}, and {self.refused_by}", at)


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
    long_text: LongText | None = Field(
        None,
        description="error refuses a long text, truncate cuts it, window divides it; the default "
        "is truncate",
    )

    def rule(self, *, report: bool | None = False) -> LongTextRule:
        """Return what to do with long texts.

        Raises:
            InvalidRequest: ``truncate`` and ``long_text`` contradict each other.
        """
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
    """Request fields that change how a text is tokenized: TEI's and Cloze's own."""

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
        if self.input_type is None and self.prompt_name is None:
            return context.default_prompt
        role = self.role()
        return context.prompt(self.prompt_name) if role is None else context.prompt_of(role)

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


class CutTextParameters(TextParameters):
    """The same fields, of tasks that do not divide long texts."""

    long_text: Literal["error", "truncate"] | None = Field(
        None, description="error refuses a long text, truncate cuts it; the default is truncate"
    )
