"""Embeddings of other layers, or pooled in another way, than a model's own.

Source: Devlin et al. 2019, table 7, which compares layers.
"""

from typing import Final, Literal

from cloze.model_store.heads import Pooling, layer_embedding
from cloze.model_store.heads.layer_embedding import LayerEmbeddingRequest
from cloze.service.core import InvalidRequest, Location, WrongTask
from cloze.service.tasks.task import TaskContext

PoolingChoice = Literal["cls", "mean", "max"]
Layers = Literal["first", "second-to-last", "last", "sum-last-four", "concat-last-four", "sum-all"]

_LAST_FOUR: Final = 4


def layer_request(
    pooling: PoolingChoice | None, layers: Layers | None, context: TaskContext
) -> LayerEmbeddingRequest | None:
    """Return the request for other vectors than the model's own; None if its own are asked for.

    Args:
        pooling: how tokens become one vector; None: as the model's own.
        layers: the layers; None: the last.
        context: the model.

    Raises:
        InvalidRequest: the model has too few layers.
        WrongTask: the model's graphs have no vectors of layers, or layers follow its pooling.
    """
    manifest = context.manifest
    recipe = manifest.embedding
    assert recipe is not None  # a model with the head has a recipe
    chosen = recipe.pooling if pooling is None else Pooling(pooling)
    if chosen is recipe.pooling and layers in (None, "last"):
        return None
    if layer_embedding.HEAD.name not in {head.name for head in manifest.graph_heads}:
        task = layer_embedding.HEAD.task
        raise WrongTask(
            "pooling and layers need vectors of layers; "
            f"export {manifest.reference} with --task {task} too"
        )
    if recipe.projected is not False:
        raise WrongTask(
            "pooling and layers need a model without layers after its pooling; "
            f"{manifest.reference} has some, or was exported before bundles said so"
        )
    return LayerEmbeddingRequest(_vectors(layers or "last", manifest.architecture.layers), chosen)


def _vectors(layers: Layers, count: int) -> list[dict[int, float]]:
    """Return the weights of each layer, for each vector; 0 is the embeddings."""
    if layers.endswith("last-four") and count < _LAST_FOUR:
        problem = f"{layers} needs {_LAST_FOUR} layers; the model has {count}"
        raise InvalidRequest(problem, Location(("layers",)))
    last_four = range(count - _LAST_FOUR + 1, count + 1)
    match layers:
        case "first":
            return [{0: 1.0}]
        case "second-to-last":
            return [{count - 1: 1.0}]
        case "last":
            return [{count: 1.0}]
        case "sum-last-four":
            return [dict.fromkeys(last_four, 1.0)]
        case "concat-last-four":
            return [{layer: 1.0} for layer in last_four]
        case "sum-all":
            return [dict.fromkeys(range(1, count + 1), 1.0)]
