"""Parts of request bodies: strictness, and one error however much is wrong."""

from typing import Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from cloze.service.tasks.embed import EmbedParameters
from cloze.service.tasks.rerank import RerankParameters
from cloze.service.tasks.similarity import SimilarityInputs
from cloze.service.tasks.texts import TruncationParameters
from cloze.service.tasks.wire import NoParameters, TokenIds, WireModel

IDS = TypeAdapter(TokenIds)


class Lenient(WireModel, extra="ignore"):
    """A body whose other fields are ignored."""

    known: int = 1


class Parts(WireModel):
    """A body with parts of every kind."""

    numbers: list[int] = Field([])
    pair: tuple[int, int] = (0, 0)
    by_name: dict[str, int] = Field({})
    texts: list[list[str]] = Field([])


UNKNOWN = {f"unknown_{number}": 1 for number in range(1000)}


@pytest.mark.parametrize(
    ("model", "body", "expected"),
    [
        (Parts, {"numbers": ["a", "b"]}, [("numbers.0", "int_type")]),
        (Parts, {"pair": ["a", "b"]}, [("pair.0", "int_type")]),
        (Parts, {"by_name": {"a": "1", "b": "2"}}, [("by_name.a", "int_type")]),
        (Parts, {"texts": [["a"], [1, 2], [3]]}, [("texts.1.0", "string_type")]),
        (Parts, {"numbers": "12"}, [("numbers", "list_type")]),
        (Parts, [1, 2, 3], [("", "model_type")]),
        (RerankParameters, {"raw_scores": 1}, [("raw_scores", "bool_type")]),
        (TruncationParameters, {"truncation_direction": 5}, [("truncation_direction", "literal_error")]),
        (Parts, UNKNOWN, [("unknown_0", "extra_forbidden")]),
        (NoParameters, UNKNOWN, [("unknown_0", "extra_forbidden")]),
        (Parts, {"numbers": ["a"], "y": 1, "pair": [1, 2], "by_name": {}, "x": 1},
         [("numbers.0", "int_type"), ("y", "extra_forbidden")]),
        (SimilarityInputs, {"x": 1},
         [("source_sentence", "missing"), ("sentences", "missing"), ("x", "extra_forbidden")]),
    ],
)  # fmt: skip
def test_each_part_has_one_error(
    model: type[WireModel], body: Any, expected: list[tuple[str, str]]
) -> None:
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    found = [(".".join(map(str, one["loc"])), one["type"]) for one in error.value.errors()]
    assert found == expected


def test_what_is_accepted() -> None:
    assert Parts.model_validate({"pair": [1, 2]}).pair == (1, 2), "a list in JSON"
    assert EmbedParameters.model_validate({"spans": [[0, 3]]}).spans == [(0, 3)]
    assert Lenient.model_validate({"known": 2, "other": 3, "another": 4}).known == 2
    upper = TruncationParameters.model_validate({"truncation_direction": "RIGHT"})
    assert upper.rule().side == "right"


@pytest.mark.parametrize("index", [0, 65_535, 65_536, 131_071, 131_072, 140_000])
@pytest.mark.parametrize("wrong", [True, 2.0, "x"])
def test_each_of_many_token_ids_is_checked(index: int, wrong: Any) -> None:
    ids: list[Any] = [1] * 140_001
    assert IDS.validate_python(ids) == ids
    ids[index:] = [wrong, None]
    with pytest.raises(ValidationError, match=f"element {index} is another"):
        IDS.validate_python(ids)
