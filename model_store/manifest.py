"""The manifest of a bundle, a frozen pydantic model. The store reads and writes its file."""

import json
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    FiniteFloat,
    PrivateAttr,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from cloze.model_store.error_lines import first_problem
from cloze.model_store.heads import (
    HEADS,
    GraphSpec,
    Head,
    Pooling,
    embedding,
    heads_of_tasks,
    masked_lm,
)
from cloze.model_store.heads.head import Frozen, ModelSizes
from cloze.model_store.layouts import Layout
from cloze.model_store.limits import (
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_GOLDEN_BYTES,
    MAX_GRAPH_BYTES,
    MAX_LAYERS,
    MAX_PARAMETERS,
    MAX_POSITIONS,
    MAX_TOKENIZER_BYTES,
    MAX_TOLERANCE,
    MAX_VOCABULARY,
    MAX_WIDTH,
)
from cloze.model_store.sealed_json import parse_sealed, seal, unseal
from cloze.model_store.sequences import SpecialTokens
from cloze.model_store.tensors import POSITION_TABLE, TOKEN_TYPE_TABLE, WORD_TABLE

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
SCHEMA_VERSION = 1

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


def _without(*names: str) -> Callable[[object], object]:
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


class Embedding(Frozen):
    """How the task ``embed`` pools, and the prompts that its users may name."""

    dimensions: Width
    pooling: Pooling
    normalize: bool = Field(
        description="whether embeddings have length 1 unless the request says otherwise"
    )
    max_tokens: Tokens = Field(description="longest sequence, special tokens included")
    prompts: dict[str, str] = Field({})
    default_prompt: str | None = None
    projected: bool | None = Field(
        None, description="whether layers follow the pooling; null in bundles that do not say so"
    )

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
    """Differences from torch that `cloze.export.verify` measured before publication."""

    tolerance: FiniteFloat = Field(
        gt=0,
        le=MAX_TOLERANCE,
        description="largest accepted |ours - torch| / max(1, max |torch|)",
    )
    max_error: dict[str, FiniteFloat] = Field(description="the largest measured error, by output")
    golden_file: FileName


_Parity = Annotated[Parity, BeforeValidator(_without("batches", "lengths"))]


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
    parity: _Parity
    gate: Gate


class StoredFile(Frozen):
    """The hash and the size of one file of the bundle."""

    sha256: Sha256
    size: int = Field(ge=0, le=MAX_FILE_BYTES, description="bytes")


class BundleSpec(Frozen):
    """The manifest without the fields that the store adds when it publishes the bundle."""

    name: BundleName
    tasks: tuple[TaskName, ...] = Field(min_length=1)
    architecture: Annotated[
        Architecture,
        BeforeValidator(_without("intermediate_size", "activation", "layer_norm_eps")),
    ]
    source: Source
    license: str | None = Field(
        description="SPDX name or the source's own words; none if the source names no license"
    )
    tokenizer: TokenizerSpec
    limits: Limits
    embedding: Embedding | None
    tables: dict[str, tuple[Rows, Width]] | None = Field(
        None,
        description="rows and columns of each table that a graph looks up, by the weight's name; "
        "null in bundles that do not say so",
    )
    graph: Graph
    parity: _Parity
    gate: Gate | None = Field(
        None, description="the gate of this graph, if its weights are rounded"
    )
    int8: LowerPrecision | None = None
    fp16: LowerPrecision | None = None
    heads: dict[str, SerializeAsAny[Frozen]] = Field(
        {}, description="options of heads, such as their labels, by head name"
    )

    @field_validator("heads", mode="before")
    @classmethod
    def _parse_head_options(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name in value:
            if name not in HEADS or HEADS[name].options is None:
                raise ValueError(f"no head {name!r} has options")
        try:
            return {
                name: _options_type(name).model_validate(options) for name, options in value.items()
            }
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None

    @property
    def graph_heads(self) -> tuple[Head, ...]:
        """The heads of the bundle's graphs."""
        return heads_of_tasks(self.tasks)

    @property
    def sizes(self) -> ModelSizes:
        """The sizes that shapes of the graphs' tensors depend on."""
        return ModelSizes(
            self.architecture.hidden_size,
            self.architecture.layers,
            self.embedding.dimensions if self.embedding else None,
            self.heads,
        )

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens, and their places around texts."""
        spec, types = self.tokenizer, self.architecture.type_vocab_size
        second_type = int(types > 1) if spec.second_type is None else spec.second_type
        return SpecialTokens(
            spec.cls_id, spec.sep_id, spec.mask_id, spec.pair_separators, second_type
        )

    def graph_spec(self, layout: Layout) -> GraphSpec:
        """Return the specification of a graph of this bundle with a layout."""
        return GraphSpec(
            layout,
            tuple(head.name for head in self.graph_heads),
            token_types=self.architecture.type_vocab_size > 0,
            pooling=self.embedding.pooling if self.embedding else None,
            layers=self.architecture.layers,
        )

    def table_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the rows and columns of each table that the graphs look up, by name."""
        if self.tables is not None:
            return dict(self.tables)
        rows = self._table_rows()
        return {name: (count, self.architecture.hidden_size) for name, count in rows.items()}

    def _table_rows(self) -> dict[str, int]:
        sizes = self.architecture
        rows = {
            WORD_TABLE: sizes.vocab_size,
            POSITION_TABLE: sizes.max_positions,
            TOKEN_TYPE_TABLE: sizes.type_vocab_size,
        }
        return {name: count for name, count in rows.items() if count}

    def lower_precisions(self) -> list[LowerPrecision]:
        """Return the bundle's graphs of lower precision."""
        return [lower for lower in (self.int8, self.fp16) if lower is not None]

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        sizes = [
            ("tokenizer.vocab_size", self.tokenizer.vocab_size, self.architecture.vocab_size),
            ("limits.max_tokens", self.limits.max_tokens, self.architecture.max_positions),
        ]
        if self.embedding is not None:
            tokens = self.embedding.max_tokens
            sizes.append(("embedding.max_tokens", tokens, self.limits.max_tokens))
        for name, size, limit in sizes:
            if size > limit:
                raise ValueError(f"{name} is {size}; the model's limit is {limit}")
        return self

    @model_validator(mode="after")
    def _tables_have_the_rows_of_the_sizes(self) -> Self:
        rows = self._table_rows()
        for name, (count, _) in (self.tables or {}).items():
            if count != rows.get(name):
                raise ValueError(
                    f"the table {name!r} has {count} rows; the architecture says {rows.get(name)}"
                )
        if self.tables is not None and WORD_TABLE not in self.tables:
            raise ValueError(f"the tables lack {WORD_TABLE!r}")
        return self

    @model_validator(mode="after")
    def _precisions_are_those_of_their_sections(self) -> Self:
        sections = ((Precision.INT8, self.int8), (Precision.FP16, self.fp16))
        graphs = [(Precision.FP32, self.graph)]
        graphs += [(precision, lower.graph) for precision, lower in sections if lower is not None]
        for precision, graph in graphs:
            if graph.precision is not precision:
                raise ValueError(
                    f"the graph {graph.file} is {graph.precision}, but its section is {precision}"
                )
        return self

    @model_validator(mode="after")
    def _tasks_have_what_they_need(self) -> Self:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"a task is named twice in {', '.join(self.tasks)}")
        names = {head.name for head in self.graph_heads}
        if (embedding.HEAD.name in names) != (self.embedding is not None):
            raise ValueError("the task embed and the section embedding come together")
        if masked_lm.HEAD.name in names and self.tokenizer.mask_id is None:
            raise ValueError("the task fill-mask needs a mask token")
        for head in self.graph_heads:
            if (head.options is not None) != (head.name in self.heads):
                raise ValueError(
                    f"the task {head.task} and the section heads.{head.name} come together"
                )
        return self


class Manifest(BundleSpec):
    """``manifest.json`` of a published bundle."""

    schema_version: Literal[1] = 1
    version: int = Field(gt=0)
    created: AwareDatetime
    files: dict[FileName, StoredFile] = Field(max_length=MAX_FILES)
    _digest: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _named_files_are_listed(self) -> Self:
        for file, limit in self._limited_files():
            if file not in self.files:
                raise ValueError(f"the file {file!r} is named but not listed under files")
            if (size := self.files[file].size) > limit:
                raise ValueError(f"the file {file!r} has {size} bytes; the limit is {limit}")
        return self

    def _limited_files(self) -> Iterator[tuple[str, int]]:
        """Yield each file that the manifest names, and the most bytes of such a file."""
        yield self.tokenizer.file, MAX_TOKENIZER_BYTES
        sections: list[Manifest | LowerPrecision] = [self, *self.lower_precisions()]
        for section in sections:
            yield section.graph.file, MAX_GRAPH_BYTES
            yield section.parity.golden_file, MAX_GOLDEN_BYTES

    @property
    def reference(self) -> str:
        """The full name, ``name@version``."""
        return f"{self.name}@{self.version}"

    def graph_of(self, precision: Precision) -> Graph | None:
        """Return the graph of a precision; None if the bundle has no such graph."""
        graphs = [self.graph, *(lower.graph for lower in self.lower_precisions())]
        return next((graph for graph in graphs if graph.precision is precision), None)

    @property
    def digest(self) -> str:
        """The digest of the manifest, and through its hashes of all files of the bundle."""
        return self._digest or _digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON.

        The last field, ``digest``, is the sha256 of the other fields.
        """
        body = self.model_dump(mode="json", exclude=self._not_said())
        return seal(body)

    def _not_said(self) -> dict[str, Any]:
        """Return the fields that bundles of earlier releases lack, so that their digests stay."""
        fields: dict[str, Any] = {}
        if not self.heads:
            fields["heads"] = True
        if self.tables is None:
            fields["tables"] = True
        if self.tokenizer.second_type is None:
            fields["tokenizer"] = {"pair_separators", "second_type"}
        return fields

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse the bytes that `to_bytes` returned.

        Raises:
            ValueError: the bytes are not JSON, are not a manifest of this schema, or were changed.
        """
        body = parse_sealed(data)
        if (schema := body.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(
                f"its schema_version is {schema!r}; this release reads {SCHEMA_VERSION}"
            )
        try:
            manifest = cls.model_validate_json(json.dumps(unseal(body, data)))
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None
        if _digest_of(manifest.to_bytes()) != body["digest"]:  # it has fields of earlier releases
            manifest._digest = str(body["digest"])
        return manifest


def _digest_of(data: bytes) -> str:
    return str(json.loads(data)["digest"])


def _options_type(head: str) -> type[Frozen]:
    options = HEADS[head].options
    assert options is not None
    return options


def parse_reference(reference: str) -> tuple[str, int | None]:
    """Split ``name`` or ``name@version``.

    Raises:
        ValueError: the name or the version is malformed.
    """
    name, at, version = reference.partition("@")
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            f"{name!r} is not a bundle name: give 1 to 64 letters, digits, '.', '_' or '-', "
            "with a letter or digit first"
        )
    if not at:
        return name, None
    if not (version.isascii() and version.isdigit() and int(version) > 0):
        raise ValueError(f"{version!r} is not a version: versions are 1, 2, 3, ...")
    return name, int(version)
