"""What a bundle promises, as a frozen pydantic model. Knows no disk: reading and writing is the store's."""

import hashlib
import json
import re
from datetime import datetime
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializeAsAny,
    StringConstraints,
    field_validator,
    model_validator,
)

from model_store.heads import HEADS, GraphSpec, Head, Pooling, heads_of_tasks
from model_store.heads.head import Frozen
from model_store.layouts import Layout

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
SCHEMA_VERSION = 1

BundleName = Annotated[str, StringConstraints(pattern=rf"^{NAME_PATTERN}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


def _plain_file_name(name: object) -> object:
    if (
        not isinstance(name, str)
        or PurePosixPath(name).name != name
        or "\\" in name
        or "\0" in name
        or name[0] == "."
    ):
        raise ValueError(f"a bundle's file name must be a plain name without folders, got {name!r}")
    return name


FileName = Annotated[str, BeforeValidator(_plain_file_name)]


def _known_task(name: str) -> str:
    heads_of_tasks((name,))
    return name


TaskName = Annotated[str, AfterValidator(_known_task)]
"""What a head is called in manifests and on the command line, for example ``fill-mask``."""


class Precision(StrEnum):
    """The arithmetic of a graph's matrix products."""

    FP32 = "fp32"
    INT8 = "int8"
    """Weights with a scale an output channel, activations with a scale a token; all else fp32."""

    FP16 = "fp16"
    """The encoder, for a GPU; LayerNorm's and attention's sums, pooling and the heads are fp32."""


class Weights(StrEnum):
    """How large weights lie on disk; arithmetic is the precision's."""

    FP32 = "fp32"
    FP16 = "fp16"
    """Half the bytes; widened once, when a server opens the graph."""

    INT8 = "int8"
    """A quarter: the encoder's matrices and the word embeddings as the integers of the int8 graph, other matrices as fp16."""


class Architecture(Frozen):
    """Sizes of the encoder. ``type_vocab_size`` is 0 where the family has no token types."""

    family: str
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    max_positions: int = Field(gt=0)
    type_vocab_size: int = Field(ge=0)
    activation: str
    layer_norm_eps: float = Field(gt=0)
    parameters: int = Field(
        gt=0, description="of the encoder and the exported heads, tied weights counted once"
    )


class Source(Frozen):
    """Where the weights came from."""

    kind: Literal["directory", "hub"]
    location: str = Field(description="the directory's name, or the hub id")
    revision: str | None = Field(description="the hub's commit; none for a directory")
    weights_sha256: Sha256


class TokenizerSpec(Frozen):
    """The tokenizer's file and the ids a server needs without asking it."""

    file: FileName
    vocab_size: int = Field(gt=0)
    lowercase: bool
    cls_id: int = Field(ge=0)
    sep_id: int = Field(ge=0)
    mask_id: int | None = Field(ge=0)
    mask_token: str | None


class Embedding(Frozen):
    """How the ``embed`` task pools, and what its users may name."""

    dimensions: int = Field(gt=0)
    pooling: Pooling
    normalize: bool = Field(
        description="whether an answer is scaled to length 1 unless the request says otherwise"
    )
    max_tokens: int = Field(gt=0, description="longest sequence, special tokens included")
    prompts: dict[str, str] = {}
    default_prompt: str | None = None

    @model_validator(mode="after")
    def _default_is_known(self) -> Self:
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ValueError(f"the default prompt {self.default_prompt!r} is not among the prompts")
        return self


class Limits(Frozen):
    """What the model itself can take; a server may allow less."""

    max_tokens: int = Field(gt=2, description="longest sequence, special tokens included")


class Graph(Frozen):
    """One ONNX graph; ``interface.py`` names its tensors."""

    file: FileName
    layout: Layout
    precision: Precision
    weights: Weights = Weights.FP32
    opset: int
    operators: dict[str, int] = Field(description="how often each operator stands in the graph")


class Parity(Frozen):
    """What `export/verify.py` measured against torch before this bundle was published."""

    tolerance: float = Field(
        gt=0, description="largest |ours - torch| / max(1, max |torch|) that is let through"
    )
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    max_error: dict[str, float] = Field(description="the largest error seen, by output")
    golden_file: FileName


class Gate(Frozen):
    """How far a graph agrees with its checkpoint as it came, before any rounding; what is under a limit is not published."""

    measured: dict[str, float]
    limits: dict[str, float]

    @model_validator(mode="after")
    def _is_passed(self) -> Self:
        for name, limit in self.limits.items():
            if not self.measured.get(name, float("nan")) >= limit:
                raise ValueError(f"{name} is {self.measured.get(name)} and must be {limit}")
        return self


class LowerPrecision(Frozen):
    """A further graph of the same weights, faster where the device has instructions for it."""

    graph: Graph
    parity: Parity
    gate: Gate


class StoredFile(Frozen):
    """A file of the bundle."""

    sha256: Sha256
    size: int = Field(ge=0, description="bytes")


class BundleSpec(Frozen):
    """Everything an exporter knows before the store gives the bundle a version."""

    name: BundleName
    tasks: tuple[TaskName, ...] = Field(min_length=1)
    architecture: Architecture
    source: Source
    license: str | None = Field(
        description="SPDX name or the source's own words; none where the source names none"
    )
    tokenizer: TokenizerSpec
    limits: Limits
    embedding: Embedding | None
    graph: Graph
    parity: Parity
    gate: Gate | None = Field(None, description="of this graph, where its weights are rounded")
    int8: LowerPrecision | None = None
    fp16: LowerPrecision | None = None
    heads: dict[str, SerializeAsAny[Frozen]] = Field(
        {}, description="what a head's users must know, by head name"
    )

    @field_validator("heads", mode="before")
    @classmethod
    def _parse_head_options(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        for name in value:
            if name not in HEADS or HEADS[name].options is None:
                raise ValueError(f"no head {name!r} has options")
        return {
            name: _options_type(name).model_validate(options) for name, options in value.items()
        }

    @property
    def graph_heads(self) -> tuple[Head, ...]:
        """The heads of the bundle's graphs."""
        return heads_of_tasks(self.tasks)

    def graph_spec(self, layout: Layout) -> GraphSpec:
        """Return what a graph of this bundle with that layout takes."""
        return GraphSpec(
            layout,
            tuple(head.name for head in self.graph_heads),
            token_types=self.architecture.type_vocab_size > 0,
            pooling=self.embedding.pooling if self.embedding else None,
        )

    def lower(self) -> list[LowerPrecision]:
        """The further graphs that there are."""
        return [lower for lower in (self.int8, self.fp16) if lower is not None]

    @model_validator(mode="after")
    def _tasks_have_what_they_need(self) -> Self:
        names = {head.name for head in self.graph_heads}
        if ("embedding" in names) != (self.embedding is not None):
            raise ValueError("the task embed and the section embedding come together")
        if "masked_lm" in names and self.tokenizer.mask_id is None:
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
    created: datetime
    files: dict[FileName, StoredFile]

    @model_validator(mode="after")
    def _named_files_are_listed(self) -> Self:
        graphs = [(self.graph, self.parity)] + [
            (lower.graph, lower.parity) for lower in self.lower()
        ]
        for file in (
            self.tokenizer.file,
            *(name for graph, parity in graphs for name in (graph.file, parity.golden_file)),
        ):
            if file not in self.files:
                raise ValueError(f"the file {file!r} is named but not listed under files")
        return self

    @property
    def reference(self) -> str:
        """The full name, ``name@version``."""
        return f"{self.name}@{self.version}"

    def graph_of(self, precision: Precision) -> Graph | None:
        """The graph of a precision; None if the bundle has none."""
        graphs = [self.graph, *(lower.graph for lower in self.lower())]
        return next((graph for graph in graphs if graph.precision is precision), None)

    def to_bytes(self) -> bytes:
        """The one serialisation: JSON whose last field, ``digest``, is the sha256 of all before it."""
        body = self.model_dump(mode="json", exclude=None if self.heads else {"heads"})
        return _dump(body | {"digest": _digest(body)})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote.

        Raises:
            ValueError: not JSON, not a manifest of this schema, or not the bytes that were written.
        """
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("a manifest is a JSON object")
        if (schema := body.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(
                f"its schema_version is {schema!r}; this release reads {SCHEMA_VERSION}"
            )
        digest = body.pop("digest", None)
        if digest != _digest(body) or data != _dump(body | {"digest": digest}):
            raise ValueError("it was changed after it was published (its digest does not match)")
        return cls.model_validate_json(json.dumps(body))


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
            f"{name!r} is not a bundle name: 1 to 64 of letters, digits, '.', '_', '-', a letter or digit first"
        )
    if not at:
        return name, None
    if not (version.isascii() and version.isdigit() and int(version) > 0):
        raise ValueError(f"{version!r} is not a version: versions are 1, 2, 3, ...")
    return name, int(version)


def _dump(body: dict[str, object]) -> bytes:
    return json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n"


def _digest(body: dict[str, object]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
