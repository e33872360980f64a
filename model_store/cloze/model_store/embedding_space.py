"""The name of a vector space: vectors of one name may share an index, whichever server made them.

The name is a hash of everything that moves a vector. The name of a bundle, its version, and the
bytes of its graphs, which another release of Cloze may write in another way, are no part of it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from cloze.model_store.heads import (
    embedding,
    lexical,
    multi_vector,
    sparse_embedding,
    token_embedding,
)
from cloze.model_store.heads.multi_vector import LateInteraction
from cloze.model_store.manifest import Manifest, Role

SPACE_CHARACTERS = 16
"""Hexadecimal digits of a name: 64 bits, so no two spaces of one organisation share a name."""


@dataclass(frozen=True, slots=True)
class VectorRecipe:
    """How a request wants its vectors.

    Attributes:
        pooling: how tokens become one vector, or what else the vectors are: ``tokens``, ``sparse``,
            or the name of a head whose weights and options move them.
        normalize: whether the vectors have length 1.
        dimensions: numbers per vector.
        prompt: the text before each text; for late interaction the role, if roles differ.
        layers: the layers that are pooled.
    """

    pooling: str
    normalize: bool
    dimensions: int
    prompt: str = ""
    layers: str = "last"


_OF_HEADS: Final = (multi_vector.HEAD.name, lexical.HEAD.name)
"""Heads whose weights are no part of the encoder's, and so have a digest of their own."""

_NO_VECTORS: Final = frozenset({"averages"})
"""Options of these heads that move scores, and no vector."""


def own_recipe(manifest: Manifest, prompt: str | None = None) -> VectorRecipe | None:
    """Return the recipe of a request without parameters; None if the model does not embed.

    Args:
        manifest: the bundle.
        prompt: the prompt of the request; None: the model's default.
    """
    if (own := manifest.embedding) is None:
        return None
    if prompt is None:
        prompt = _own_prompt(manifest)
    return VectorRecipe("+".join(own.poolings), own.normalize, own.dimensions, prompt)


def tokens_recipe(manifest: Manifest, prompt: str, role: Role = Role.DOCUMENT) -> VectorRecipe:
    """Return the recipe of vectors of tokens, which late interaction makes for a role."""
    options = manifest.heads.get(multi_vector.HEAD.name)
    if not isinstance(options, LateInteraction):
        size = manifest.architecture.hidden_size
        return VectorRecipe("tokens", normalize=False, dimensions=size, prompt=prompt)
    differs = role.value if options.roles_differ else ""
    return VectorRecipe(multi_vector.HEAD.name, True, options.dimensions, differs)


def words_recipe(manifest: Manifest, prompt: str) -> VectorRecipe:
    """Return the recipe of weights of the words of the vocabulary."""
    kind = lexical.HEAD.name if lexical.HEAD.name in manifest.heads else "sparse"
    size = manifest.tokenizer.vocab_size
    return VectorRecipe(kind, normalize=False, dimensions=size, prompt=prompt)


def own_recipes(manifest: Manifest) -> Mapping[str, VectorRecipe]:
    """Return the recipes of requests without parameters, by the task that a bundle has heads of."""
    heads = {head.name for head in manifest.graph_heads}
    prompt, recipes = _own_prompt(manifest), {}
    if embedding.HEAD.name in heads and (own := own_recipe(manifest)) is not None:
        recipes["embed"] = own
    if heads & {token_embedding.HEAD.name, multi_vector.HEAD.name}:
        recipes["embed-all"] = tokens_recipe(manifest, prompt)
    if heads & {sparse_embedding.HEAD.name, lexical.HEAD.name}:
        recipes["embed-sparse"] = words_recipe(manifest, prompt)
    return recipes


def _own_prompt(manifest: Manifest) -> str:
    """Return the model's default prompt; "" if it has none."""
    own = manifest.embedding
    return own.prompts.get(own.default_prompt or "", "") if own else ""


def embedding_space(manifest: Manifest, precision: str, recipe: VectorRecipe) -> str | None:
    """Return the name of the space of a model's vectors.

    Args:
        manifest: the bundle.
        precision: the precision of the graph that runs; "" while none runs.
        recipe: how the request wants its vectors.

    Returns:
        None without a precision, and for vectors from a layer that has no digest: of late
        interaction, lexical weights and layers after the pooling in bundles of earlier releases.
    """
    source, own, tokenizer = manifest.source, manifest.embedding, manifest.tokenizer
    says_all = source.settings_sha256 is not None or own is None or own.projected is False
    if not precision or not says_all:
        return None
    parts: dict[str, object] = {
        "weights": source.weights_sha256,
        "settings": source.settings_sha256,
        "rounded_to": manifest.graph.weights,
        "precision": precision,
        "tokenizer": manifest.files[tokenizer.file].sha256,
        "special_tokens": [tokenizer.cls_id, tokenizer.sep_id],
        "max_tokens": own.max_tokens if own else manifest.limits.max_tokens,
        "recipe": asdict(recipe),
    }
    if tokenizer.truncation_side != "right":
        parts["truncation_side"] = tokenizer.truncation_side
    if (
        own
        and recipe.pooling == "+".join(own.poolings)
        and recipe.prompt
        and not own.include_prompt
    ):
        parts["include_prompt"] = False
    if (head := recipe.pooling) in _OF_HEADS:
        if head not in source.parts_sha256:
            return None
        options = manifest.heads[head].model_dump(
            mode="json", exclude_defaults=True, exclude=set(_NO_VECTORS)
        )
        parts["head"] = [source.parts_sha256[head], options]
    written = json.dumps(parts, sort_keys=True).encode()
    return hashlib.sha256(written).hexdigest()[:SPACE_CHARACTERS]
