"""The sizes of an encoder. Does not depend on torch."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass as validated

from cloze.model_store.limits import MAX_LAYERS, MAX_POSITIONS, MAX_VOCABULARY, MAX_WIDTH

Part = Literal["attention", "up", "down", "norm", "head", "decoder"]
"""The parts of a model that may lack biases."""

USUAL_PADDING_ID: Final = 1
"""The id of the padding token in most checkpoints whose positions begin after it."""


@validated(frozen=True, slots=True)
class RelativePositions:
    """The sizes of attention to contents and positions apart (He et al. 2021, section 3.1).

    ``distances`` is the distance M that the last bucket reaches to. ``buckets`` is the number of
    buckets on each side; 0: each distance up to M has its own. ``terms`` are the products beside
    that of the contents: of queries with positions of keys (``c2p``), of keys with positions of
    queries (``p2c``). ``share_projections`` says whether positions are projected as contents are,
    and ``norm`` whether their embeddings are normalised.

    Raises:
        pydantic.ValidationError: a size exceeds its limits.
    """

    distances: Annotated[int, Field(gt=1, le=MAX_POSITIONS)]
    buckets: Annotated[int, Field(ge=0, le=MAX_POSITIONS)]
    terms: tuple[str, ...]
    share_projections: bool = False
    norm: bool = False

    @property
    def reach(self) -> int:
        """The number of embeddings on each side of the middle."""
        return self.buckets or self.distances

    @model_validator(mode="after")
    def _are_usable(self) -> Self:
        if not self.terms or set(self.terms) - {"c2p", "p2c"}:
            raise ValueError(f"pos_att_type {list(self.terms)} is not supported (c2p, p2c)")
        if self.buckets and not 1 < self.buckets // 2 < self.distances - 1:
            raise ValueError(
                f"position_buckets: {self.buckets} buckets do not fit distances up to "
                f"{self.distances} (max_relative_positions)"
            )
        return self


@validated(frozen=True, slots=True)
class Convolution:
    """The sizes of a convolution over neighbouring tokens.

    Raises:
        pydantic.ValidationError: a size exceeds its limits.
    """

    kernel: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    groups: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    activation: str

    @model_validator(mode="after")
    def _is_centred(self) -> Self:
        if self.kernel % 2 == 0:
            raise ValueError(
                f"conv_kernel_size: a convolution of {self.kernel} tokens has no middle"
            )
        return self


@validated(frozen=True, slots=True)
class EncoderConfig:
    """The sizes of an encoder. The constructor validates every size.

    ``type_vocab_size`` is 0 for a family without token types. ``activation`` is a key of
    `layer.ACTIVATIONS`. ``embedding_size`` is the width of the embeddings if they are
    projected to the hidden size. ``layers`` counts a layer as often as a text passes it;
    ``layer_groups`` is the number of groups that share their weights, of ``group_layers`` layers
    each; None: no layers share weights. ``task_types`` says whether the checkpoint has embeddings
    of task types. ``gated`` feed-forward networks multiply the activation by a second product.
    ``without_bias`` names the parts without biases: ``up`` stands for both products of a gated
    feed-forward network, ``head`` for the layer before the last one of a head. ``rotary_base`` is
    the base of rotary positions, and ``rotary_factor`` their scaling (`rotary.Rotary`); None: the
    positions have a table. ``bottleneck`` is the size of attention and feed-forward networks if it
    is not the hidden size, and ``feed_forwards`` the number of such networks in a layer. ``pooler``
    says whether the heads for whole texts have a layer before the last one.
    ``position_embeddings`` says whether the encoder has embeddings of positions.
    ``relative_positions`` and ``convolution`` are None for an encoder without them.
    ``legacy_lm_head`` says whether the head of masked language modelling has its older names, in a
    family with two sets of names.
    ``local_layers`` says of each layer whether its tokens attend only to those at most ``window``
    tokens away; empty: none do. Those layers may have a base of their own, ``local_rotary_base``.
    ``head_activation`` is the activation of heads; None: the usual ones.
    ``classifier_pooling`` says which rows a classifier reads: the first one, or the mean of all.
    ``padding_id`` is the id of the padding token in a family whose position table has rows up to
    this number that belong to no token; the first token has the row after it.

    Raises:
        pydantic.ValidationError: a size is not a number or exceeds its limits.
    """

    family: str
    vocab_size: Annotated[int, Field(gt=0, le=MAX_VOCABULARY)]
    hidden_size: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)]
    heads: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    intermediate_size: Annotated[int, Field(gt=0, le=MAX_WIDTH)]
    max_positions: Annotated[int, Field(gt=2, le=MAX_POSITIONS)]
    type_vocab_size: Annotated[int, Field(ge=0, le=MAX_WIDTH)]
    activation: str = "gelu"
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    embedding_size: Annotated[int, Field(gt=0, le=MAX_WIDTH)] | None = None
    layer_groups: Annotated[int, Field(gt=0, le=MAX_LAYERS)] | None = None
    group_layers: Annotated[int, Field(gt=0, le=MAX_LAYERS)] = 1
    task_types: bool = False
    bottleneck: Annotated[int, Field(gt=0, le=MAX_WIDTH)] | None = None
    feed_forwards: Annotated[int, Field(gt=0, le=MAX_LAYERS)] = 1
    pooler: bool = True
    gated: bool = False
    without_bias: frozenset[Part] = frozenset()
    rotary_base: Annotated[float, Field(gt=1)] | None = None
    rotary_factor: Annotated[float, Field(ge=1)] = 1.0
    local_layers: tuple[bool, ...] = ()
    window: Annotated[int, Field(gt=0, le=MAX_POSITIONS)] | None = None
    local_rotary_base: Annotated[float, Field(gt=1)] | None = None
    head_activation: str | None = None
    classifier_pooling: Literal["cls", "mean"] = "cls"
    position_embeddings: bool = True
    relative_positions: RelativePositions | None = None
    convolution: Convolution | None = None
    legacy_lm_head: bool = True
    padding_id: Annotated[int, Field(ge=0, le=MAX_POSITIONS)] = USUAL_PADDING_ID

    @property
    def embedding_width(self) -> int:
        """The width of the word embeddings."""
        return self.embedding_size or self.hidden_size

    @property
    def head_size(self) -> int:
        """The size of one attention head."""
        return (self.bottleneck or self.hidden_size) // self.heads

    def has_bias(self, part: Part) -> bool:
        """Return whether the linear layers or norms of a part have biases."""
        return part not in self.without_bias

    @model_validator(mode="after")
    def _every_layer_is_described(self) -> Self:
        if self.local_layers and len(self.local_layers) != self.layers:
            raise ValueError(
                f"layer_types has {len(self.local_layers)} kinds of attention for {self.layers} "
                "layers"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        name, size = (
            ("bottleneck", self.bottleneck) if self.bottleneck else ("hidden", self.hidden_size)
        )
        if size % self.heads:
            raise ValueError(
                f"{name} size {size} is not a multiple of the {self.heads} attention heads"
            )
        if self.rotary_base is not None and self.head_size % 2:
            raise ValueError(f"rotary positions need an even number per head, got {self.head_size}")
        return self
