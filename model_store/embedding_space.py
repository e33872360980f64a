"""The name of a vector space: vectors of one name may share an index, whichever server made them.

The name is a hash of everything that moves a vector. The name of a bundle, its version, and the
bytes of its graphs, which another release of Cloze may write in another way, are no part of it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from cloze.model_store.manifest import Manifest

SPACE_CHARACTERS = 16
"""Hexadecimal digits of a name: 64 bits, so no two spaces of one organisation share a name."""


@dataclass(frozen=True, slots=True)
class VectorRecipe:
    """How a request wants its vectors.

    Attributes:
        pooling: how tokens become one vector, or what else the vectors are: ``tokens``, ``sparse``.
        normalize: whether the vectors have length 1.
        dimensions: numbers per vector.
        prompt: the text before each text.
        layers: the layers that are pooled.
    """

    pooling: str
    normalize: bool
    dimensions: int
    prompt: str = ""
    layers: str = "last"


UNNAMED: Final = VectorRecipe("unnamed", normalize=False, dimensions=0)
"""The recipe of vectors from a layer that no digest of a bundle covers: their space has no name."""


def own_recipe(manifest: Manifest, prompt: str | None = None) -> VectorRecipe | None:
    """Return the recipe of a request without parameters; None if the model does not embed.

    Args:
        manifest: the bundle.
        prompt: the prompt of the request; None: the model's default.
    """
    if (own := manifest.embedding) is None:
        return None
    if prompt is None:
        prompt = own.prompts.get(own.default_prompt or "", "")
    return VectorRecipe("+".join(own.poolings), own.normalize, own.dimensions, prompt)


def embedding_space(manifest: Manifest, precision: str, recipe: VectorRecipe) -> str | None:
    """Return the name of the space of a model's vectors.

    Args:
        manifest: the bundle.
        precision: the precision of the graph that runs; "" while none runs.
        recipe: how the request wants its vectors.

    Returns:
        None without a precision, and for vectors from a layer that has no digest: those of late
        interaction, lexical weights, and layers after the pooling in bundles of earlier releases.
    """
    source, own, tokenizer = manifest.source, manifest.embedding, manifest.tokenizer
    says_all = source.settings_sha256 is not None or own is None or own.projected is False
    if not precision or not says_all or recipe == UNNAMED:
        return None
    parts = {
        "weights": source.weights_sha256,
        "settings": source.settings_sha256,
        "rounded_to": manifest.graph.weights,
        "precision": precision,
        "tokenizer": manifest.files[tokenizer.file].sha256,
        "special_tokens": [tokenizer.cls_id, tokenizer.sep_id],
        "max_tokens": own.max_tokens if own else manifest.limits.max_tokens,
        "recipe": asdict(recipe),
    }
    written = json.dumps(parts, sort_keys=True).encode()
    return hashlib.sha256(written).hexdigest()[:SPACE_CHARACTERS]
