"""Late interaction: texts become queries or documents, whose vectors of tokens are compared.

Sources: Khattab & Zaharia 2020, "ColBERT"; PyLate's ``ColBERT``; Chen et al. 2024, "BGE M3".
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import Manifest
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import multi_vector
from cloze.model_store.heads.multi_vector import LateInteraction, MultiVectorRequest
from cloze.model_store.manifest import Role
from cloze.service.core import Float32, InvalidRequest, Location, quoted
from cloze.service.tasks.task import Input, Outputs, TaskContext, TextUsage
from cloze.service.tasks.texts import Offsets, TextEncoder, own_ids
from cloze.service.tasks.windows import LongTextRule


class Kept(NamedTuple):
    """Which tokens of a text count.

    Attributes:
        tokens: bool [S], the tokens whose vectors count.
        before: number of tokens before those of the text.
        own: number of the text's tokens.
    """

    tokens: NDArray[np.bool_]
    before: int
    own: int

    def offsets(self, places: Offsets) -> Offsets:
        """Return the places of the tokens that count, from those of the text's tokens."""
        after = len(self.tokens) - self.before - self.own
        all_places = [*[None] * self.before, *places, *[None] * after]
        return [place for place, kept in zip(all_places, self.tokens, strict=True) if kept]


def interaction(manifest: Manifest) -> LateInteraction | None:
    """Return how a model compares vectors of tokens; None if it does not."""
    return cast(LateInteraction | None, manifest.heads.get(multi_vector.HEAD.name))


def role_of(prompt_name: str | None) -> Role:
    """Return the role that a request's ``prompt_name`` names; the default is document.

    Raises:
        InvalidRequest: it is no role.
    """
    if prompt_name is None:
        return Role.DOCUMENT
    if prompt_name not in [role.value for role in Role]:
        problem = f"{quoted(prompt_name)} is not one of the model's roles (query, document)"
        raise InvalidRequest(problem, Location(("prompt_name",)))
    return Role(prompt_name)


def encode(
    texts: Sequence[Input[str | list[int]]], role: Role, rule: LongTextRule, context: TaskContext
) -> tuple[TextEncoder, list[Kept]]:
    """Return the encodings of texts in a role, and which tokens of each count."""
    options, tokenizer = interaction(context.manifest), context.tokenizer
    assert options is not None  # callers ask models with the head
    most = options.query_tokens if role is Role.QUERY else options.document_tokens
    encoder = TextEncoder(rule, context, min(most, context.limits.max_tokens))
    ids = iter(tokenizer.ids([text for _, text in texts if isinstance(text, str)]))
    kept = []
    for at, text in texts:
        own = next(ids) if isinstance(text, str) else own_ids(text, at, tokenizer)
        kept.append(_add(encoder, at, own, role, options))
    return encoder, kept


def _add(
    encoder: TextEncoder, at: Location, ids: Sequence[int], role: Role, options: LateInteraction
) -> Kept:
    """Add the encoding of one text: its marker is the second token, and a query is filled."""
    tokenizer = encoder.context.tokenizer
    marker = options.query_marker if role is Role.QUERY else options.document_marker
    markers = [] if marker is None else [marker]
    before = 1 + len(markers)
    [(first, end)] = encoder.divide(at, len(ids), before + 1)
    sequence = tokenizer.special.text([*markers, *ids[first:end]])
    read = len(sequence)
    keys = 0
    if role is Role.QUERY and options.filling is not None:
        sequence += [options.filling] * (encoder.max_tokens - read)
        keys = read if options.has_unattended and len(sequence) > read else 0
    input_ids = np.array(sequence, np.int32)
    requests = {multi_vector.HEAD.name: MultiVectorRequest(keys)}
    encoding = Encoding(input_ids, np.zeros_like(input_ids), requests)
    encoder.add_encodings([encoding], TextUsage(len(ids) + before + 1, read))
    tokens = np.ones(len(sequence), bool)
    if role is Role.DOCUMENT:
        tokens = ~np.isin(input_ids, options.skipped_ids)
    if options.skips_first:
        tokens[0] = False
    return Kept(tokens, before, read - before - 1)


def places(
    texts: Sequence[Input[str]], kept: Sequence[Kept], encoder: TextEncoder
) -> list[Offsets]:
    """Return the place of each token that counts, in characters of its text."""
    found: list[Offsets] = []
    for (_, text), one in zip(texts, kept, strict=True):
        found.append(one.offsets([*encoder.places(text, one.own)]))
    return found


def vectors(outputs: Outputs, kept: Sequence[Kept]) -> list[Float32]:
    """Return the vectors [n, D] of each text's tokens that count."""
    return [
        np.ascontiguousarray(output[multi_vector.HEAD.name].array[one.tokens])
        for output, one in zip(outputs, kept, strict=True)
    ]


def scores(query: Float32, documents: Sequence[Float32], options: LateInteraction) -> list[float]:
    """Return the sum of each query vector's best product with a document's (MaxSim).

    Source: Khattab & Zaharia 2020, equation 3. The sum over no vector of a document is 0.
    """
    divisor = len(query) if options.averages else 1
    return [
        float((query @ document.T).max(1).sum()) / divisor if len(document) else 0.0
        for document in documents
    ]
