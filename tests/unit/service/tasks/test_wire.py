"""Parts of request bodies: strictness, and one error however much is wrong."""

from typing import Any

import pytest
from pydantic import Field, TypeAdapter, ValidationError

from cloze.service.tasks import rerank
from cloze.service.tasks.embed import EmbedParameters
from cloze.service.tasks.similarity import SimilarityInputs
from cloze.service.tasks.texts import TruncationParameters
from cloze.service.tasks.wire import (
    Count,
    CountOrZero,
    NoParameters,
    Text,
    Texts,
    TokenIds,
    WireModel,
)

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


def errors_of(model: type[WireModel], body: dict[str, Any]) -> list[tuple[Any, str]]:
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    return [(one["loc"], one["type"]) for one in error.value.errors()]


def test_validation_stops_at_the_first_wrong_element_of_each_part() -> None:
    assert errors_of(Parts, {"numbers": ["a", "b", "c"]}) == [(("numbers", 0), "int_type")]
    assert errors_of(Parts, {"pair": ["a", "b"]}) == [(("pair", 0), "int_type")]
    assert len(errors_of(Parts, {"by_name": {"a": "1", "b": "2"}})) == 1
    assert errors_of(Parts, {"texts": [["a"], [1, 2], [3]]}) == [(("texts", 1, 0), "string_type")]


def test_a_pair_is_a_list_in_json() -> None:
    assert Parts.model_validate({"pair": [1, 2]}).pair == (1, 2)
    assert errors_of(Parts, {"pair": ["1", 2]}) == [(("pair", 0), "int_type")]
    assert EmbedParameters.model_validate({"spans": [[0, 3]]}).spans == [(0, 3)]


def test_validation_is_strict() -> None:
    assert errors_of(Parts, {"numbers": "12"}) == [(("numbers",), "list_type")]
    assert errors_of(rerank.RerankParameters, {"raw_scores": 1}) == [(("raw_scores",), "bool_type")]


def test_only_the_first_unknown_field_is_reported() -> None:
    many = {f"unknown_{number}": 1 for number in range(1000)}
    assert errors_of(Parts, many) == [(("unknown_0",), "extra_forbidden")]
    assert errors_of(NoParameters, many) == [(("unknown_0",), "extra_forbidden")]
    body = {"numbers": ["a"], "y": 1, "pair": [1, 2], "by_name": {}, "x": 1}
    assert errors_of(Parts, body) == [(("numbers", 0), "int_type"), (("y",), "extra_forbidden")]


def test_known_fields_stay_beside_an_unknown_one() -> None:
    body = {"source_sentence": 1, "sentences": [], "x": 1}
    assert errors_of(SimilarityInputs, body) == [
        (("source_sentence",), "string_type"),
        (("x",), "extra_forbidden"),
    ]
    assert errors_of(SimilarityInputs, {"x": 1}) == [
        (("source_sentence",), "missing"),
        (("sentences",), "missing"),
        (("x",), "extra_forbidden"),
    ]


def test_a_model_may_ignore_other_fields() -> None:
    assert Lenient.model_validate({"known": 2, "other": 3}).known == 2
    assert Lenient.model_validate({"other": 3, "another": 4}).known == 1


def test_what_is_no_object_is_refused() -> None:
    assert errors_of(Parts, [1, 2, 3, 4, 5])[0][1] == "model_type"  # type: ignore[arg-type]


def test_token_ids_are_integers_only() -> None:
    assert IDS.validate_python([0, 5]) == [0, 5]
    for wrong, index in (([True, 1], 0), ([1, 2.0], 1), ([1, "2", None], 1)):
        with pytest.raises(ValidationError, match=f"element {index} is another value"):
            IDS.validate_python(wrong)


@pytest.mark.parametrize("index", [65_535, 65_536, 131_071, 131_072, 140_000])
def test_each_of_many_token_ids_is_checked(index: int) -> None:
    ids: list[Any] = [1] * 140_001
    assert IDS.validate_python(ids) == ids
    ids[index] = "x"
    with pytest.raises(ValidationError, match=f"list of integers; element {index} is another"):
        IDS.validate_python(ids)


def test_limits_are_part_of_the_schema() -> None:
    assert TypeAdapter(Text).json_schema() == {"type": "string", "minLength": 1}
    assert TypeAdapter(Texts).json_schema()["minItems"] == 1
    assert TypeAdapter(Count).json_schema() == {"type": "integer", "minimum": 1}
    assert TypeAdapter(CountOrZero).json_schema() == {"type": "integer", "minimum": 0}
    assert IDS.json_schema() == {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "minItems": 1,
    }


def test_a_direction_is_read_without_regard_to_case() -> None:
    assert (
        TruncationParameters.model_validate({"truncation_direction": "RIGHT"}).rule().side
        == "right"
    )
    for wrong in ("up", 5):
        assert errors_of(TruncationParameters, {"truncation_direction": wrong})[0][1] == (
            "literal_error"
        )
