"""Errors have the place of what is wrong as data; each protocol shows it by its own field names."""

import pytest

from cloze.service.errors import InvalidRequest, Location
from cloze.service.http.body import validate
from cloze.service.protocols.native import body_type
from cloze.service.protocols.tei import _Decode
from cloze.service.tasks import TASKS
from cloze.service.tasks.task import INPUTS
from cloze.service.tasks.wire import Text, Texts, WireModel

DECODE = object.__new__(_Decode)  # its names need no models


class Nested(WireModel):
    count: int = 0


class Body(WireModel):
    inputs: Text | Texts | Nested = ""
    parameters: Nested | None = None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"parameters": {"count": "a"}}, "parameters.count: Input should be a valid integer"),
        ({"inputs": ["a", 5]}, "inputs.1: Input should be a valid string"),
        (
            {"parameters": {"cuont": 1}},
            "parameters.cuont: there is no such field (the nearest: count)",
        ),
        ({"counts": 1}, "counts: there is no such field (the nearest: inputs.count)"),
        ([], "the body: Input should be an object"),
    ],
)
def test_a_message_names_the_place_in_the_body(value: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(Body, value)
    assert message in str(caught.value).split("; ")


def test_only_the_type_that_fits_best_is_named() -> None:
    """And not what another type would have needed."""
    for body, message in (
        ({"inputs": {"question": "who"}}, "inputs.context: Field required"),
        ({"inputs": [{"question": "who"}]}, "inputs.0.context: Field required"),
        (
            {"inputs": {"question": "who", "context": 3}},
            "inputs.context: Input should be a valid string",
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            validate(body_type(TASKS["qa"]), body)
        assert str(caught.value) == message


def test_a_protocol_has_its_own_names() -> None:
    assert str(DECODE.in_body(INPUTS, None)) == "ids"
    other = Location(("inputs_of", "another"))
    assert str(DECODE.in_body(other, None)) == "inputs_of.another"


def test_an_error_keeps_its_words_in_another_place() -> None:
    error = InvalidRequest("the windows hold 410 tokens", INPUTS.below(3, "question"), "up to ")
    assert str(error) == "up to inputs[3].question the windows hold 410 tokens"
    assert error.at is not None
    moved = error.moved(DECODE.in_body(error.at, None))
    assert str(moved) == "up to ids[3].question the windows hold 410 tokens"
    assert type(moved) is InvalidRequest
