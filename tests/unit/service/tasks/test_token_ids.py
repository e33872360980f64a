"""Tokens of texts, and texts of tokens: places in bytes, limits, and what is refused."""

import re
from typing import Any

import pytest

from cloze.service.errors import InvalidRequest
from cloze.service.tasks import token_ids
from cloze.service.tasks.task import PreparedRequest, TaskContext
from cloze.service.tasks.token_ids import DECODE, TOKENIZE, Token
from tests.support.task_model import CLS, CONTEXT, ID, SEP, UNK, VOCABULARY, ids, limited


def tokenized(inputs: Any, model: TaskContext = CONTEXT, **parameters: Any) -> PreparedRequest[Any]:
    made = token_ids.TokenizeParameters(**parameters)
    return TOKENIZE.prepare(inputs, made, model)


def all_tokens(inputs: Any, model: TaskContext = CONTEXT, **parameters: Any) -> list[list[Token]]:
    request = tokenized(inputs, model, **parameters)
    tokens: list[list[Token]] = TOKENIZE.decode(request.state, [], model)
    return tokens


def test_tokens_have_their_places_between_special_tokens() -> None:
    assert all_tokens("the reds") == [
        [
            Token(CLS, "[CLS]", True, None, None),
            Token(ID["the"], "the", False, 0, 3),
            Token(ID["red"], "red", False, 4, 7),
            Token(ID["##s"], "s", False, 7, 8),
            Token(SEP, "[SEP]", True, None, None),
        ]
    ]


def test_special_tokens_may_be_left_out() -> None:
    assert all_tokens(["a", "b", " "], add_special_tokens=False) == [
        [Token(ID["a"], "a", False, 0, 1)],
        [Token(ID["b"], "b", False, 0, 1)],
        [],
    ]
    assert [t.text for t in all_tokens(" ")[0]] == ["[CLS]", "[SEP]"]


def test_places_are_in_bytes_of_the_text() -> None:
    # Characters of two, two, three and four bytes: the limits of each length, and one below.
    text = "a\u00e9\u07ff\u0800\U00010000 \u007f\u0080\uffff a"
    first, *_, last = all_tokens(text, add_special_tokens=False)[0]
    assert (first.start, last.start, last.stop) == (0, len(text[:-1].encode()), len(text.encode()))
    for index, character in enumerate(text):
        prefix = text[: index + 1]
        assert token_ids.byte_ends(text)[index + 1] == len(prefix.encode()), character


def test_an_unknown_token_has_the_text_that_stands_there() -> None:
    [[token]] = all_tokens("\N{SNOWMAN}", add_special_tokens=False)
    assert token == Token(UNK, "\N{SNOWMAN}", False, 0, 3)


def test_a_prompt_is_part_of_the_text() -> None:
    [tokens] = all_tokens("the", prompt_name="query", add_special_tokens=False)
    assert [(t.text, t.start) for t in tokens] == [("ask", 0), (":", 4), ("the", 6)]


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


def prepared_ids(
    inputs: Any, model: TaskContext = CONTEXT, **parameters: Any
) -> PreparedRequest[Any]:
    made = token_ids.DecodeParameters(**parameters)
    return DECODE.prepare(inputs, made, model)


def texts_of(inputs: Any, **parameters: Any) -> list[str]:
    return DECODE.decode(prepared_ids(inputs, **parameters).state, [], CONTEXT)


def test_ids_are_joined_to_texts() -> None:
    assert texts_of(ids("the red ##s")) == ["the reds"]
    wrapped = [CLS, ID["the"], SEP]
    assert texts_of([wrapped, ids("red door")]) == ["the", "red door"]
    assert texts_of(wrapped, skip_special_tokens=False) == ["[CLS] the [SEP]"]


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    assert texts_of([0, len(VOCABULARY), 2**32 - 1, ID["the"]]) == ["[PAD] the"]
