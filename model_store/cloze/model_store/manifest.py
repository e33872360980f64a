"""The manifest of a bundle, a frozen pydantic model. The store reads and writes its file.

`sections` has the parts of a manifest. The last field of the file is the digest of the others.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from cloze.model_store.adapter_section import AdapterSupport
from cloze.model_store.error_lines import first_problem
from cloze.model_store.heads import (
    HEADS,
    GraphSpec,
    Head,
    embedding,
    entities,
    heads_of_tasks,
    masked_lm,
    sequence_classification,
)
from cloze.model_store.heads.head import Frozen, ModelSizes
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.model_store.layouts import Layout
from cloze.model_store.limits import (
    MAX_ADAPTER_BYTES,
    MAX_FILES,
    MAX_GOLDEN_BYTES,
    MAX_GRAPH_BYTES,
    MAX_TOKENIZER_BYTES,
)
from cloze.model_store.sections import (
    NAME_PATTERN,
    Architecture,
    BundleName,
    Embedding,
    FileName,
    Gate,
    Graph,
    Limits,
    LowerPrecision,
    MeasuredParity,
    Parity,
    Precision,
    Role,
    Rows,
    Source,
    StoredFile,
    TaskName,
    TokenizerSpec,
    Weights,
    Width,
    without,
)
from cloze.model_store.sequences import SpecialTokens
from cloze.model_store.tensors import POSITION_TABLE, TOKEN_TYPE_TABLE, WORD_TABLE

SCHEMA_VERSION = 1

__all__ = [
    "NAME_PATTERN",
    "Architecture",
    "BundleSpec",
    "Embedding",
    "Gate",
    "Graph",
    "Limits",
    "LowerPrecision",
    "Manifest",
    "Parity",
    "Precision",
    "Role",
    "Source",
    "StoredFile",
    "TokenizerSpec",
    "Weights",
    "parse_reference",
]


class BundleSpec(Frozen):
    """The manifest without the fields that the store adds when it publishes the bundle."""

    name: BundleName
    tasks: tuple[TaskName, ...] = Field(min_length=1)
    architecture: Annotated[
        Architecture,
        BeforeValidator(
            without(
                *("intermediate_size", "activation", "layer_norm_eps"),
                *("layer_heads", "layer_intermediate_sizes"),
            )
        ),
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
    parity: MeasuredParity
    gate: Gate | None = Field(
        None, description="the gate of this graph, if its weights are rounded"
    )
    int8: LowerPrecision | None = None
    fp16: LowerPrecision | None = None
    adapters: AdapterSupport | None = Field(
        None, description="the graphs that take adapters; null: the bundle takes none"
    )
    heads: dict[str, SerializeAsAny[Frozen]] = Field(
        {}, description="options of heads, such as their labels, by head name"
    )
    label_encoder: "BundleSpec | None" = Field(
        None,
        description="of a bi-encoder: the encoder that embeds labels for the task entities, a "
        "bundle in the same folder; its files begin with labels-",
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
            include_prompt=self.embedding is None or self.embedding.include_prompt,
            options=self.heads,
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

    def parities(self) -> list[Parity]:
        """Return the measured differences of all graphs from torch."""
        return [self.parity, *(lower.parity for lower in self.lower_precisions())]

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
    def _label_encoder_fits(self) -> Self:
        labels, options = self.label_encoder, self.heads.get(entities.HEAD.name)
        needed: int | None = getattr(options, "label_size", None)
        if labels is not None and labels.label_encoder is not None:
            raise ValueError("the encoder of labels has an encoder of labels")
        size = labels.embedding.dimensions if labels and labels.embedding else None
        if (labels is None) != (needed is None) or size != needed:
            raise ValueError(
                f"heads.entities.label_size is {needed}, but the vectors of label_encoder have "
                f"{size or 'no'} numbers"
            )
        return self

    @model_validator(mode="after")
    def _ids_of_heads_are_in_the_vocabulary(self) -> Self:
        size = self.tokenizer.vocab_size
        for name, options in self.heads.items():
            if outside := [number for number in options.token_ids if not 0 <= number < size]:
                raise ValueError(
                    f"heads.{name} has the id {outside[0]}, which is not in the vocabulary of "
                    f"{size} tokens"
                )
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
            needs_options = head.options is not None and not head.has_default_options
            if needs_options and head.name not in self.heads:
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
        if (labels := self.label_manifest) is not None:
            yield from labels._limited_files()
        yield self.tokenizer.file, MAX_TOKENIZER_BYTES
        sections: list[Manifest | LowerPrecision] = [self, *self.lower_precisions()]
        for section in sections:
            yield section.graph.file, MAX_GRAPH_BYTES
            yield section.parity.golden_file, MAX_GOLDEN_BYTES
        if self.adapters is not None:
            for graph in filter(None, (self.adapters.graph, self.adapters.int8)):
                yield graph.file, MAX_GRAPH_BYTES
            if self.adapters.tensors_file is not None:
                yield self.adapters.tensors_file, MAX_ADAPTER_BYTES

    @property
    def label_manifest(self) -> "Manifest | None":
        """The manifest of the encoder of labels as a bundle; None: the model is no bi-encoder."""
        if self.label_encoder is None:
            return None
        return Manifest(
            **dict(self.label_encoder),
            version=self.version,
            created=self.created,
            files=self.files,
        )

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
        return self._digest or _digest(self._body())

    def to_bytes(self) -> bytes:
        """Return the manifest as JSON.

        The last field, ``digest``, is the sha256 of the other fields.
        """
        return seal(self._body())

    def _body(self) -> "Body":
        return self.model_dump(mode="json", exclude=self._not_said())

    def _not_said(self) -> dict[str, Any]:
        """Return the fields without a value that earlier releases do not know.

        So the digests of their bundles stay, and they open ours.
        """
        fields: dict[str, Any] = {}
        labels = self.heads.get(sequence_classification.HEAD.name)
        if not self.heads:
            fields["heads"] = True
        elif isinstance(labels, SequenceLabels) and labels.raw_scores is None:
            fields["heads"] = {sequence_classification.HEAD.name: {"raw_scores"}}
        for section in ("tables", "adapters", "label_encoder"):
            if getattr(self, section) is None:
                fields[section] = True
        if self.tokenizer.second_type is None:
            fields["tokenizer"] = {"pair_separators", "second_type"}
        if self.tokenizer.truncation_side == "right":
            fields["tokenizer"] = {"truncation_side", *fields.get("tokenizer", ())}
        digests = ("settings_sha256", "encoder_sha256", "parts_sha256")
        if unknown := {name for name in digests if not getattr(self.source, name)}:
            fields["source"] = unknown
        if (own := self.embedding) is not None:
            usual = {
                "further_poolings": not own.further_poolings,
                "include_prompt": own.include_prompt,
            }
            fields["embedding"] = {name for name, is_usual in usual.items() if is_usual}
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
        if _digest(manifest._body()) != body["digest"]:  # it has fields of earlier releases
            manifest._digest = str(body["digest"])
        return manifest


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


Body = dict[str, object]
"""The fields of a JSON object."""


def seal(body: Body) -> bytes:
    """Return an object as JSON; the last field, ``digest``, is the sha256 of the other fields."""
    return _dump(body | {"digest": _digest(body)})


def parse_sealed(data: bytes) -> Body:
    """Return the fields of an object from the bytes that `seal` returned, without checking them.

    Raises:
        ValueError: the bytes are not a JSON object.
    """
    try:
        body = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("a manifest is a JSON object")
    return body


def unseal(body: Body, data: bytes) -> Body:
    """Return the fields without the digest, after a check of the digest.

    Raises:
        ValueError: the bytes are not those that `seal` returned for these fields.
    """
    content = {name: value for name, value in body.items() if name != "digest"}
    try:
        is_sealed = data == seal(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not is_sealed:
        raise ValueError("it was changed after it was published (its digest does not match)")
    return content


def _dump(body: Body) -> bytes:
    return json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n"


def _digest(body: Body) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
