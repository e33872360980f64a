"""Tokens of texts, and texts of tokens: places in bytes, limits, and what is refused."""

import re
from typing import Any

import pytest

from cloze.service.errors import InvalidRequest
from cloze.service.tasks import token_ids
from cloze.service.tasks.task import PreparedRequest, TaskContext
from cloze.service.tasks.token_ids import TOKENIZE, Token
from tests.support.task_model import CONTEXT, limited


def tokenized(inputs: Any, model: TaskContext = CONTEXT, **parameters: Any) -> PreparedRequest[Any]:
    made = token_ids.TokenizeParameters(**parameters)
    return TOKENIZE.prepare(inputs, made, model)


def all_tokens(inputs: Any, model: TaskContext = CONTEXT, **parameters: Any) -> list[list[Token]]:
    request = tokenized(inputs, model, **parameters)
    tokens: list[list[Token]] = TOKENIZE.decode(request.state, [], model)
    return tokens


def test_places_are_in_bytes_of_the_text() -> None:
    # Characters of two, two, three and four bytes: the limits of each length, and one below.
    text = "a\u00e9\u07ff\u0800\U00010000 \u007f\u0080\uffff a"
    first, *_, last = all_tokens(text, add_special_tokens=False)[0]
    assert (first.start, last.start, last.stop) == (0, len(text[:-1].encode()), len(text.encode()))
    for index, character in enumerate(text):
        prefix = text[: index + 1]
        assert token_ids.byte_ends(text)[index + 1] == len(prefix.encode()), character


def test_a_long_text_has_its_tokens_in_order() -> None:
    model = limited(max_text_characters=10_000, max_results=5000)
    [tokens] = all_tokens("a b " * 1025, model)
    assert [t.text for t in tokens[1:-1]] == ["a", "b"] * 1025
    assert [t.start for t in tokens[1:-1]] == list(range(0, 4100, 2))


def test_a_text_that_exceeds_the_limit_is_not_tokenized_to_its_end() -> None:
    model = limited(max_text_characters=200_000, max_results=100)
    with pytest.raises(InvalidRequest) as error:
        tokenized("a b " * 40_000, model)
    assert int(re.findall(r"\d+", str(error.value))[0]) < 60_000  # of 80,000
