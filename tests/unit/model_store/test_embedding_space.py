"""What is part of the name of a vector space, on a manifest without files."""

from typing import Any

import pytest

from cloze.model_store import Manifest
from cloze.model_store.embedding_space import (
    VectorRecipe,
    embedding_space,
    own_recipe,
    own_recipes,
    tokens_recipe,
)
from tests.support.task_model import manifest

TOKENS_ONLY = {"tasks": ("embed-all",), "embedding": None, "heads": {}}

RECIPE = VectorRecipe("mean", normalize=True, dimensions=4)


def name(described: Manifest, precision: str = "fp32", **changes: Any) -> str | None:
    fields = {"pooling": "mean", "normalize": True, "dimensions": 4} | changes
    return embedding_space(described, precision, VectorRecipe(**fields))


def changed(part: str, **changes: Any) -> Manifest:
    """Return the manifest with changes of a part."""
    return manifest(**{part: manifest().model_dump(mode="json")[part] | changes})


def test_the_recipe_of_a_request_without_parameters() -> None:
    assert own_recipe(manifest()) == RECIPE
    assert own_recipe(manifest(**TOKENS_ONLY)) is None
    plain = tokens_recipe(manifest(), "")
    assert plain == VectorRecipe("tokens", normalize=False, dimensions=4)
    assert own_recipes(manifest()).keys() == {"embed", "embed-all", "embed-sparse"}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalize": False},
        {"dimensions": 3},
        {"pooling": "cls"},
        {"prompt": "ask : "},
        {"layers": "first"},
        {"precision": "int8"},
    ],
    ids=str,
)
def test_a_request_is_part_of_the_name(changes: dict[str, Any]) -> None:
    assert name(manifest(), **changes) not in (None, name(manifest()))


@pytest.mark.parametrize(
    ("part", "changes", "moves"),
    [
        ("source", {"weights_sha256": "1" * 64}, True),
        ("source", {"settings_sha256": "1" * 64}, True),
        ("embedding", {"max_tokens": 9}, True),
        ("tokenizer", {"truncation_side": "left"}, True),
        ("tokenizer", {"cls_id": 7}, True),
        ("files", {"tokenizer.json": {"size": 1, "sha256": "1" * 64}}, True),
        ("source", {"location": "elsewhere", "revision": "abc"}, False),
        ("limits", {"max_tokens": 11}, False),
        ("embedding", {"normalize": False}, False),
        ("files", {"g.onnx": {"size": 2, "sha256": "1" * 64}}, False),
    ],
    ids=str,
)
def test_what_moves_a_vector_is_part_of_the_name(
    part: str, changes: dict[str, Any], moves: bool
) -> None:
    other = name(changed(part, **changes))
    assert other is not None
    assert (other != name(manifest())) == moves


def test_a_prompt_that_is_left_out_is_part_of_it_where_there_is_a_prompt() -> None:
    left_out = changed("embedding", include_prompt=False)
    assert name(left_out, prompt="ask : ") != name(manifest(), prompt="ask : ")
    assert name(left_out) == name(manifest())


def test_without_vectors_of_texts_the_longest_sequence_is_part_of_it() -> None:
    tokens = tokens_recipe(manifest(), "")
    names = {
        embedding_space(manifest(**TOKENS_ONLY, limits={"max_tokens": most}), "fp32", tokens)
        for most in (11, 12)
    }
    assert len(names) == 2
