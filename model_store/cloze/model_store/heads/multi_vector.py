"""Multi-vector: one vector of length 1 per token, for late interaction.

The result is the vectors [S, D] of a sequence, special tokens included. Queries may be filled with
mask tokens. The filling is scored, but mostly the other tokens do not attend to the filling: it has
queries and no keys.

Source: Khattab & Zaharia 2020, "ColBERT", section 3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from pydantic import Field

from cloze.model_store.heads.head import Frozen, GraphSpec, Head, HeadRequest
from cloze.model_store.heads.rows import per_token
from cloze.model_store.layouts import Feeds, Layout, Placement
from cloze.model_store.limits import MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH
from cloze.model_store.tensors import TensorSpec

KEY_SEQUENCES: Final = TensorSpec(
    "key_sequences", "int32", ("A",), "sequences with tokens to which no token attends", "dense"
)
KEY_TOKENS: Final = TensorSpec(
    "key_tokens", "int32", ("A",), "number of their first tokens, to which tokens attend", "dense"
)
VECTOR_ROWS: Final = TensorSpec(
    "vector_rows", "int32", ("V",), "the rows of `hidden` to project: all rows of a sequence"
)
MULTI_VECTORS: Final = TensorSpec(
    "multi_vectors", "float32", ("V", "F"), "one vector of F numbers per token, of length 1"
)


class LateInteraction(Frozen):
    """How texts become queries and documents, and which vectors of them count."""

    dimensions: int = Field(gt=0, le=MAX_WIDTH)
    query_marker: int | None = Field(None, ge=0, description="id behind a query's first token")
    document_marker: int | None = Field(None, ge=0, description="id behind a document's first one")
    query_tokens: int = Field(gt=3, le=MAX_POSITIONS, description="longest query, markers included")
    document_tokens: int = Field(gt=3, le=MAX_POSITIONS)
    filling: int | None = Field(None, ge=0, description="id that fills a query to its length")
    attends_to_filling: bool = False
    skipped_ids: tuple[int, ...] = Field(
        (), max_length=MAX_VOCABULARY, description="tokens of documents whose vectors are left out"
    )
    skips_first: bool = Field(False, description="whether the first vector of a text is left out")
    averages: bool = Field(
        False, description="whether a score is divided by the number of the query's vectors"
    )

    @property
    def has_unattended(self) -> bool:
        """Whether queries have tokens to which no token attends."""
        return self.filling is not None and not self.attends_to_filling

    @property
    def roles_differ(self) -> bool:
        """Whether a text has other vectors as a query than as a document."""
        as_query = self.query_marker, self.query_tokens, self.filling, ()
        return as_query != (self.document_marker, self.document_tokens, None, self.skipped_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """See `Frozen`."""
        others = (self.query_marker, self.document_marker, self.filling)
        return (*self.skipped_ids, *(number for number in others if number is not None))


@dataclass(frozen=True, slots=True)
class MultiVectorRequest(HeadRequest):
    """Return the vectors of all tokens of a sequence.

    Attributes:
        keys: see `HeadRequest`.
    """

    keys: int = 0  # type: ignore[misc]  # a field stands for the constant


_pack_rows, _unpack = per_token(VECTOR_ROWS, MULTI_VECTORS)


def _pack(
    requests: Sequence[MultiVectorRequest | None], placement: Placement, graph: GraphSpec
) -> Feeds:
    feeds = _pack_rows(requests, placement, graph)
    if graph.layout is Layout.PACKED:
        return feeds
    keys = [(i, request.keys) for i, request in enumerate(requests) if request and request.keys]
    sequences, tokens = np.array(keys, np.int32).reshape(-1, 2).T
    return feeds | {KEY_SEQUENCES.name: sequences.copy(), KEY_TOKENS.name: tokens.copy()}


def _dimensions(options: Frozen | None) -> dict[str, int]:
    return {"F": options.dimensions} if isinstance(options, LateInteraction) else {}


HEAD: Final = Head(
    name="multi_vector",
    task="multi-vector",
    inputs=(KEY_SEQUENCES, KEY_TOKENS, VECTOR_ROWS),
    outputs=(MULTI_VECTORS,),
    request=MultiVectorRequest,
    pack=_pack,
    unpack=_unpack,
    per_token=True,
    largest_request=lambda _: MultiVectorRequest(),
    options=LateInteraction,
    model_sizes=lambda sizes: _dimensions(sizes.options.get("multi_vector")),
)
