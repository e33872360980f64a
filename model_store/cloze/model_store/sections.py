"""The sections of a manifest, frozen pydantic models; `manifest` joins them."""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    FiniteFloat,
    StringConstraints,
    model_validator,
)

from cloze.model_store.heads import Pooling, heads_of_tasks
from cloze.model_store.heads.head import Frozen
from cloze.model_store.layouts import Layout
from cloze.model_store.limits import (
    MAX_FILE_BYTES,
    MAX_LAYERS,
    MAX_PARAMETERS,
    MAX_POSITIONS,
    MAX_TOLERANCE,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from cloze.model_store.sequences import Side

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"

BundleName = Annotated[str, StringConstraints(pattern=rf"^{NAME_PATTERN}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _plain_file_name(name: object) -> object:
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            "a bundle's file name must be a plain name without folders, 1 to 64 letters, digits, "
            f"'.', '_' or '-' with a letter or digit first, got {name!r}"
        )
    return name


FileName = Annotated[str, BeforeValidator(_plain_file_name)]
GraphFileName = Annotated[FileName, StringConstraints(pattern=r"\.onnx$")]
"""A runtime takes a file with another ending, such as ``.ort``, for another format."""

Tokens = Annotated[int, Field(gt=2, le=MAX_POSITIONS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Rows = Annotated[int, Field(gt=0, le=MAX_VOCABULARY)]


def _known_task(name: str) -> str:
    heads_of_tasks((name,))
    return name


TaskName = Annotated[str, AfterValidator(_known_task)]
"""A head's name in manifests and on the command line, for example ``fill-mask``."""


class Precision(StrEnum):
    """The arithmetic of a graph's matrix products."""

    FP32 = "fp32"
    INT8 = "int8"
    """int8 products: one scale per output channel of weights, one scale per token of inputs."""

    FP16 = "fp16"
    """fp16 in the encoder, for a GPU.

    The sums of LayerNorm and attention, the pooling and the heads are fp32.
    """


class Weights(StrEnum):
    """The number format of large weights on disk. `Precision` is the format of the arithmetic."""

    FP32 = "fp32"
    FP16 = "fp16"
    """Half the bytes of fp32. A server converts the weights to fp32 when it opens the graph."""

    INT8 = "int8"
    """A quarter of the bytes of fp32.

    The encoder's matrices and the word embeddings are stored as the integers of the int8 graph,
    the other matrices as fp16.
    """


def without(*names: str) -> Callable[[object], object]:
    """Return a validator that leaves out fields of earlier releases, which no reader uses."""

    def leave_out(fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if name not in names}

    return leave_out


class Architecture(Frozen):
    """Sizes of the encoder. ``type_vocab_size`` is 0 if the family has no token types."""

    family: str
    vocab_size: int = Field(gt=0, le=MAX_VOCABULARY)
    hidden_size: Width
    layers: int = Field(gt=0, le=MAX_LAYERS)
    heads: Width
    max_positions: Tokens
    type_vocab_size: int = Field(ge=0, le=MAX_WIDTH)
    parameters: int = Field(
        gt=0,
        le=MAX_PARAMETERS,
        description="numbers in the encoder and the exported heads, tied weights counted once",
    )


class Source(Frozen):
    """The origin of the weights."""

    kind: Literal["directory", "hub"]
    location: str = Field(description="the directory's name, or the hub id")
    revision: str | None = Field(description="the hub's commit; none for a directory")
    weights_sha256: Sha256
    settings_sha256: Sha256 | None = Field(
        None,
        description="digest of the encoder's settings and of the layers after the pooling; null in "
        "bundles of earlier releases",
    )
    encoder_sha256: Sha256 | None = Field(
        None,
        description="digest of the encoder's settings and weights before rounding, without heads; "
        "adapters and shared heads name their base by it; null in bundles of earlier releases",
    )
    parts_sha256: dict[str, Sha256] = Field(
        {},
        description="digest of the weights of each head outside the encoder's tensors, by head; "
        "none in bundles of earlier releases",
    )


class TokenizerSpec(Frozen):
    """The tokenizer's file, and the ids that a server needs before it opens the file."""

    file: FileName
    vocab_size: int = Field(gt=0, le=MAX_VOCABULARY)
    lowercase: bool
    cls_id: int = Field(ge=0)
    sep_id: int = Field(ge=0)
    mask_id: int | None = Field(ge=0)
    mask_token: str | None
    pair_separators: int = Field(
        1, ge=1, le=2, description="number of tokens with sep_id between the texts of a pair"
    )
    second_type: int | None = Field(
        None,
        ge=0,
        le=1,
        description="token type of a pair's second text; null: 1 if the model has two types",
    )
    truncation_side: Side = Field(
        "right", description="end of a long text that is cut unless the request says otherwise"
    )

    @model_validator(mode="after")
    def _ids_are_in_the_vocabulary(self) -> Self:
        for number in (self.cls_id, self.sep_id, self.mask_id or 0):
            if number >= self.vocab_size:
                raise ValueError(
                    f"the id {number} is not in the vocabulary of {self.vocab_size} tokens"
                )
        if (self.mask_id is None) != (self.mask_token is None):
            raise ValueError("mask_id and mask_token come together")
        return self


class Role(StrEnum):
    """What a text is for in a search: models may have another prompt for each role."""

    QUERY = "query"
    DOCUMENT = "document"


_PROMPTS_OF_ROLES: Final = {
    Role.QUERY: ("query",),
    Role.DOCUMENT: ("document", "passage", "corpus"),
}
"""The prompts of each role, as ``encode_query`` and ``encode_document`` look for them."""


class Embedding(Frozen):
    """How the task ``embed`` pools, and the prompts that its users may name."""

    dimensions: Width
    pooling: Pooling
    further_poolings: tuple[Pooling, ...] = Field(
        (), description="poolings whose vectors follow that of the first one, in this order"
    )
    normalize: bool = Field(
        description="whether embeddings have length 1 unless the request says otherwise"
    )
    max_tokens: Tokens = Field(description="longest sequence, special tokens included")
    prompts: dict[str, str] = Field({})
    default_prompt: str | None = None
    include_prompt: bool = Field(
        True, description="whether the start token and the tokens of a prompt are pooled"
    )
    projected: bool | None = Field(
        None, description="whether layers follow the pooling; null in bundles that do not say so"
    )

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        """All poolings, in the order of their vectors."""
        return (self.pooling, *self.further_poolings)

    def prompt_of(self, role: Role) -> str | None:
        """Return the name of the prompt of a role, by the names of sentence-transformers.

        A model without such a prompt has its default prompt for the role, or none.
        """
        named = (name for name in _PROMPTS_OF_ROLES[role] if name in self.prompts)
        return next(named, self.default_prompt)

    @property
    def roles_differ(self) -> bool:
        """Whether queries and documents have different prompts, or other ones than other texts."""
        texts = {self.prompts.get(self.prompt_of(role) or "", "") for role in Role}
        return texts != {self.prompts.get(self.default_prompt or "", "")}

    @model_validator(mode="after")
    def _default_is_known(self) -> Self:
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"the default prompt {self.default_prompt!r} is not among the prompts")
        return self


class Limits(Frozen):
    """Limits of the model; a server may set lower limits."""

    max_tokens: Tokens = Field(description="longest sequence, special tokens included")


class Graph(Frozen):
    """One ONNX graph; `docs/tensors.md` lists its inputs and outputs."""

    file: GraphFileName
    layout: Layout
    precision: Precision
    weights: Weights = Weights.FP32
    opset: int
    operators: dict[str, int] = Field(description="number of nodes of each operator")


class Parity(Frozen):
    """Differences from torch that `cloze.export.check.verify` measured before publication."""

    tolerance: FiniteFloat = Field(
        gt=0,
        le=MAX_TOLERANCE,
        description="largest accepted |ours - torch| / max(1, max |torch|)",
    )
    max_error: dict[str, FiniteFloat] = Field(description="the largest measured error, by output")
    golden_file: FileName


MeasuredParity = Annotated[Parity, BeforeValidator(without("batches", "lengths"))]


class Gate(Frozen):
    """How far a graph agrees with its checkpoint before rounding.

    A graph below a limit is not published.
    """

    measured: dict[str, float]
    limits: dict[str, float]

    @model_validator(mode="after")
    def _is_passed(self) -> Self:
        for name, limit in self.limits.items():
            if not self.measured.get(name, float("nan")) >= limit:
                raise ValueError(
                    f"{name} is {self.measured.get(name)}, but must be at least {limit}"
                )
        return self


class LowerPrecision(Frozen):
    """A further graph of the same weights, faster on a device with instructions for it."""

    graph: Graph
    parity: MeasuredParity
    gate: Gate


class StoredFile(Frozen):
    """The hash and the size of one file of the bundle."""

    sha256: Sha256
    size: int = Field(ge=0, le=MAX_FILE_BYTES, description="bytes")
