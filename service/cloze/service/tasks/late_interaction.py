"""Late interaction: texts become queries or documents, whose vectors of tokens are compared.

Sources: Khattab & Zaharia 2020, "ColBERT"; PyLate's ``ColBERT``; Chen et al. 2024, "BGE M3".
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from cloze.model_store import Manifest
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import multi_vector
from cloze.model_store.heads.multi_vector import LateInteraction, MultiVectorRequest
from cloze.model_store.manifest import Role
from cloze.service.core import Float32
from cloze.service.tasks.task import Input, Outputs, TaskContext
from cloze.service.tasks.texts import LongTextRule, TextEncoder, own_ids

Kept = NDArray[np.bool_]
"""Whether the vector of each token of a text counts: bool [S]."""


def interaction(manifest: Manifest) -> LateInteraction | None:
    """Return how a model compares vectors of tokens; None if it does not."""
    return cast(LateInteraction | None, manifest.heads.get(multi_vector.HEAD.name))


def encode(
    texts: Sequence[Input[str | list[int]]], role: Role, rule: LongTextRule, context: TaskContext
) -> tuple[TextEncoder, list[Kept]]:
    """Return the encodings of texts in a role, and which tokens of each count.

    The second token of a sequence is the marker of the role. The filling follows a short query:
    ``[CLS] [Q] red door [SEP] [MASK] [MASK]``, for example.
    """
    options, tokenizer = interaction(context.manifest), context.tokenizer
    assert options is not None  # callers ask models with the head
    marker, most = options.document_marker, options.document_tokens
    if role is Role.QUERY:
        marker, most = options.query_marker, options.query_tokens
    markers = [] if marker is None else [marker]
    max_tokens = min(most, rule.limit(context.limits.max_tokens))
    encoder = TextEncoder(rule, context, max_tokens)
    encoder.before += len(markers)
    ids = iter(tokenizer.ids([text for _, text in texts if isinstance(text, str)]))
    kept = []
    for at, text in texts:
        own = next(ids) if isinstance(text, str) else own_ids(text, at, tokenizer)
        [(first, end)] = encoder.divide(at, len(own), encoder.before + 1)
        sequence = tokenizer.special.text([*markers, *own[first:end]])
        read, keys = len(sequence), 0
        if role is Role.QUERY and options.filling is not None:
            sequence += [options.filling] * (encoder.max_tokens - read)
            keys = read if options.has_unattended and len(sequence) > read else 0
        input_ids = np.array(sequence, np.int32)
        requests = {multi_vector.HEAD.name: MultiVectorRequest(keys)}
        encoding = Encoding(input_ids, np.zeros_like(input_ids), requests)
        encoder.keep([encoding], len(own) + encoder.before + 1, read)
        skipped = options.skipped_ids if role is Role.DOCUMENT else ()
        counts = ~np.isin(input_ids, skipped)
        if options.skips_first:
            counts[0] = False
        kept.append(counts)
    return encoder, kept


def vectors(outputs: Outputs, kept: Sequence[Kept]) -> list[Float32]:
    """Return the vectors [n, D] of each text's tokens that count."""
    return [
        np.ascontiguousarray(output[multi_vector.HEAD.name].array[tokens])
        for output, tokens in zip(outputs, kept, strict=True)
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
