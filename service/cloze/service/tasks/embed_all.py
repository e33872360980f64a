"""Token embeddings: one vector per token of a text.

A model of late interaction returns the vectors that it compares; `prompt_name` is then the role of
the texts, ``query`` or ``document``.

Source: the route ``/embed_all`` of text-embeddings-inference.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from cloze.model_store.embedding_space import tokens_recipe
from cloze.model_store.heads import HeadRequest, multi_vector, token_embedding
from cloze.model_store.manifest import Role
from cloze.service.core import Float32
from cloze.service.errors import InvalidRequest, Location, quoted
from cloze.service.tasks import late_interaction
from cloze.service.tasks.late_interaction import Kept
from cloze.service.tasks.task import Outputs, PreparedRequest, Task, TaskContext
from cloze.service.tasks.texts import CutTextParameters, EmbedInputs, Offsets, encode_texts

_REQUEST: Final = {token_embedding.HEAD.name: HeadRequest()}


class TokenParameters(CutTextParameters):
    """The fields of text-embeddings-inference, and one of our own."""

    return_offsets: bool | None = None
    """whether to add the place of each token in its text; the answer is JSON"""


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """The vectors of a text's tokens, special tokens included, and their places.

    A document of late interaction has no vectors of the tokens that its model skips.

    Attributes:
        embeddings: [S][H].
        offsets: (start, end) in characters; null for special tokens and those of a prompt.
    """

    embeddings: list[list[float]]
    offsets: Offsets


class _State(NamedTuple):
    """The places of the tokens if they were asked for, and which tokens count if not all do."""

    offsets: list[Offsets] | None
    kept: list[Kept] | None = None


def prepare(
    inputs: Any, parameters: TokenParameters, context: TaskContext
) -> PreparedRequest[_State]:
    """Tokenize the texts."""
    texts = context.limits.checked(inputs)
    for at, text in texts:
        if parameters.return_offsets and not isinstance(text, str):
            raise InvalidRequest("is a list of token ids, which have no offsets", at)
    kept, role, prompt = None, Role.DOCUMENT, ""
    rule = parameters.rule(report=parameters.return_usage)
    if late_interaction.interaction(context.manifest) is None:
        prompt = parameters.prompt(context)
        encoder = encode_texts(texts, rule, context, _REQUEST, prompt)
    else:
        name = Role.DOCUMENT if parameters.prompt_name is None else parameters.prompt_name
        if name not in [*Role]:
            problem = f"{quoted(name)} is not one of the model's roles (query, document)"
            raise InvalidRequest(problem, Location(("prompt_name",)))
        role = parameters.role() or Role(name)
        encoder, kept = late_interaction.encode(texts, role, rule, context)
    context.limits.check_results(encoder.tokens, "the request asks for", "vectors")
    offsets = encoder.offsets(texts) if parameters.return_offsets else None
    if offsets is not None and kept is not None:
        offsets = [
            [place for place, counts in zip_longest(places, tokens) if counts]  # no place: filling
            for places, tokens in zip(offsets, kept, strict=True)
        ]
    recipe = tokens_recipe(context.manifest, prompt, role)
    return encoder.prepared(_State(offsets, kept), recipe)


def decode(state: _State, outputs: Outputs, _: TaskContext) -> list[Float32] | list[TokenVectors]:
    """Return the vectors [S, H] float32 of each text, special tokens included."""
    if state.kept is None:
        vectors = [output[token_embedding.HEAD.name].array for output in outputs]
    else:
        vectors = late_interaction.vectors(outputs, state.kept)
    if state.offsets is None:
        return vectors
    return [TokenVectors(*pair) for pair in zip(vectors, state.offsets, strict=True)]


TASK: Final = Task(
    name="embed-all",
    route="/embed_all",
    summary="One vector per token of a text",
    heads=(token_embedding.HEAD.name,),
    other_heads=(multi_vector.HEAD.name,),
    inputs=EmbedInputs,
    parameters=TokenParameters,
    result=list[list[list[float]]] | list[TokenVectors],
    prepare=prepare,
    decode=decode,
    examples={
        "One text": {"inputs": "What is deep learning?"},
        "With the place of each token": {"inputs": "A cat sat.", "return_offsets": True},
    },
    vectors=True,
)
