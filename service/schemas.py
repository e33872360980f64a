"""The wire's request bodies: exact, strict, unknown fields refused. What each means is the tasks' business."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

Model = Annotated[str | None, Field(description="a served model, NAME or NAME@VERSION; none: the task's default")]


# One error is enough to say what is wrong; collecting one for every element of a large body would exhaust memory.
class _FirstError(FailFast):
    """`FailFast`, hashable, as a union's members must be."""

    def __hash__(self) -> int:
        return hash(type(self))


Texts = Annotated[list[str], _FirstError()]
TokenIds = Annotated[list[int], _FirstError()]
TextOrTexts = str | TokenIds | Annotated[list[str | TokenIds], _FirstError()]


class Body(BaseModel):
    """A request body or a part of one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FillMaskParameters(Body):
    """As huggingface_hub's ``fill_mask`` sends them."""

    top_k: int | None = Field(None, description="predictions a mask; 5 unless given")
    targets: str | Texts | None = Field(None, description="tokens to choose among; scores stay those over the whole vocabulary")


class FillMaskBody(Body):
    """``POST /fill-mask``."""

    inputs: str | Texts = Field(
        description="a text with at least one [MASK], or a list of them", examples=["Paris is the [MASK] of France."]
    )
    parameters: FillMaskParameters | None = None
    model: Model = None


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class EmbedBody(Body):
    """``POST /embed``: text-embeddings-inference's fields, and huggingface_hub's ``feature_extraction``."""

    inputs: TextOrTexts = Field(description="a text, its token ids, or a list of either", examples=["What is deep learning?"])
    normalize: bool | None = Field(None, description="scale to length 1; unless given, as the model's recipe says")
    truncate: bool | None = Field(None, description="false: refuse a text that is too long instead of cutting it")
    truncation_direction: Annotated[Literal["left", "right"] | None, BeforeValidator(_lower)] = Field(
        None, description="which end to cut; right unless given"
    )
    prompt_name: str | None = Field(None, description="one of the model's prompts, put before each text")
    dimensions: int | None = Field(None, description="keep only the first so many dimensions")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="accepted for huggingface_hub; the answer is floats"
    )
    model: Model = None


class OpenAiEmbeddingsBody(Body):
    """``POST /v1/embeddings``, as OpenAI's clients send it."""

    input: TextOrTexts = Field(description="a text, its token ids, or a list of either", examples=["What is deep learning?"])
    model: str = Field(description="a served model, NAME or NAME@VERSION")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of little-endian float32; floats unless given"
    )
    dimensions: int | None = Field(None, description="keep only the first so many dimensions")
    user: str | None = Field(None, description="accepted and not looked at")


class Pair(Body):
    """Two texts: does ``next`` follow ``text``?"""

    text: str
    next: str


class Candidates(Body):
    """One text and possible successors to rank."""

    text: str
    candidates: Texts


class NspBody(Body):
    """``POST /nsp``."""

    inputs: Pair | Candidates | Annotated[list[Pair], _FirstError()] = Field(
        description="a pair, a list of pairs, or a text with candidates to rank",
        examples=[{"text": "He opened the door.", "next": "Then he went in."}],
    )
    model: Model = None


class QaPair(Body):
    """A question and the text to find its answer in."""

    question: str
    context: str


class QaParameters(Body):
    """transformers v4's parameters, by their names and with their defaults."""

    top_k: int | None = Field(None, description="answers a question; 1 unless given")
    doc_stride: int | None = Field(
        None, description="tokens that neighbouring windows share; min(max_seq_len // 2, 128) unless given"
    )
    max_answer_len: int | None = Field(None, description="tokens an answer may have; 15 unless given")
    max_seq_len: int | None = Field(None, description="tokens of a window; 384, or what the model reads, unless given")
    max_question_len: int | None = Field(None, description="a longer question is cut; 64 tokens unless given")
    handle_impossible_answer: bool | None = Field(None, description="whether 'no answer' is a candidate")
    align_to_words: bool | None = Field(None, description="move an answer's ends to those of words; true unless given")


class QaBody(Body):
    """``POST /qa``."""

    inputs: QaPair | Annotated[list[QaPair], _FirstError()] = Field(
        description="a question with its context, or a list of them",
        examples=[{"question": "Who wrote it?", "context": "It was written by Ada."}],
    )
    parameters: QaParameters | None = None
    model: Model = None
