"""What all tasks do with the texts of a request: names in errors, what was cut, what it costs."""

from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.masked_lm import MaskedLMResult
from cloze.service.tasks import TASKS
from cloze.service.tasks.nsp import Candidates, Pair
from cloze.service.tasks.qa import QaPair
from cloze.service.tasks.similarity import SimilarityInputs
from cloze.service.tasks.task import TextUsage
from cloze.service.tasks.text_classification import TextPair
from tests.support.refusals import refused
from tests.support.task_model import (
    ID,
    context,
    decoded,
    ids,
    limited,
    manifest,
    prepared,
    tokens,
)

LONG = "a b c d e f g h i j k"  # 13 tokens; the model reads 12, embeddings read 10


def compared(source: str, *sentences: str) -> SimilarityInputs:
    return SimilarityInputs(source_sentence=source, sentences=list(sentences))


@pytest.mark.parametrize(
    ("task", "inputs", "name"),
    [
        ("text-classification", "", "inputs"),
        ("text-classification", [TextPair(text="a", text_pair="")], "inputs[0].text_pair"),
        ("token-classification", ["a", ""], "inputs[1]"),
        ("nsp", Pair(text="", next="a"), "inputs.text"),
        ("nsp", Candidates(text="a", candidates=["a", ""]), "inputs.candidates[1]"),
        ("score", ["a", ""], "inputs[1]"),
        ("fill-mask", ["[MASK]", ""], "inputs[1]"),
        ("embed", ["a", []], "inputs[1]"),
        ("embed-all", ["a", ""], "inputs[1]"),
        ("embed-sparse", ["a", ""], "inputs[1]"),
        ("qa", QaPair(question="", context="a"), "inputs.question"),
        ("qa", [QaPair(question="a", context="")], "inputs[0].context"),
        ("similarity", compared("", "a"), "inputs.source_sentence"),
        ("similarity", compared("a", "a", ""), "inputs.sentences[1]"),
    ],
)
def test_an_empty_text_is_named(task: str, inputs: Any, name: str) -> None:
    with refused("empty_input", at=name):
        prepared(task, inputs)


@pytest.mark.parametrize(
    ("task", "text"),
    [
        *((task, "[MASK]") for task in ("text-classification", "token-classification")),
        *((task, "[MASK]") for task in ("embed", "embed-all", "embed-sparse", "fill-mask")),
        ("nsp", Pair(text="a", next="b")),
        ("qa", QaPair(question="a", context="b")),
        ("score", "a"),
    ],
)
def test_texts_are_limited(task: str, text: Any) -> None:
    prepared(task, [text] * 4)
    with refused("limit_exceeded", 5, 4, at="inputs"):
        prepared(task, [text] * 5)


def test_texts_that_are_compared_are_limited() -> None:
    prepared("nsp", Candidates(text="a", candidates=["b"] * 4))
    with refused("limit_exceeded", 5, 4, at="inputs.candidates"):
        prepared("nsp", Candidates(text="a", candidates=["b"] * 5))
    prepared("similarity", compared("a", "b", "c", "d"))
    with refused("limit_exceeded", 4, 1, 4, at="inputs.sentences"):
        prepared("similarity", compared("a", "b", "c", "d", "e"))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_an_empty_list_for_no_text(task: str) -> None:
    """Only the task says that a list is empty: validation accepts the list."""
    inputs = compared("a") if task == "similarity" else []
    place = "inputs.sentences" if task == "similarity" else "inputs"
    with refused("empty_input", at=place):
        prepared(task, inputs)


@pytest.mark.parametrize(
    ("task", "read"),
    [
        ("text-classification", 12),
        ("token-classification", 12),
        ("embed", 10),
        ("embed-all", 10),
        ("embed-sparse", 10),
    ],
)
def test_a_long_text_is_cut_or_refused(task: str, read: int) -> None:
    words, kept = LONG.split(), read - 2
    request = prepared(task, [LONG, "a", LONG], return_usage=True)
    assert tokens(request)[0] == f"[CLS] {' '.join(words[:kept])} [SEP]"
    assert request.truncated == 2
    assert request.usage == [TextUsage(13, read), TextUsage(3, 3), TextUsage(13, read)]
    assert prepared(task, LONG).usage is None
    whole = prepared(task, " ".join(words[:kept]), long_text="error")
    assert (whole.truncated, whole.usage) == (0, None)
    with refused("text_too_long", 13, read, at="inputs"):
        prepared(task, LONG, long_text="error")
    if task != "token-classification":
        left = prepared(task, LONG, truncation_direction="left")
        assert tokens(left) == [f"[CLS] {' '.join(words[-kept:])} [SEP]"]


def test_the_word_of_a_request_overrules_the_end_that_the_tokenizer_cuts() -> None:
    tokenizer = manifest().tokenizer.model_dump() | {"truncation_side": "left"}
    model, words = context(tokenizer=tokenizer), LONG.split()
    for asked, kept in ((None, words[-8:]), ("left", words[-8:]), ("right", words[:8])):
        request = prepared("embed", LONG, model, truncation_direction=asked)
        assert tokens(request) == [f"[CLS] {' '.join(kept)} [SEP]"]


def test_cut_pairs_are_counted() -> None:
    pairs = [Pair(text=LONG, next="a"), Pair(text="a", next="b"), Pair(text="a", next=LONG)]
    request = prepared("nsp", pairs, return_usage=True)
    assert request.truncated == 2
    assert request.usage == [TextUsage(15, 12), TextUsage(5, 5), TextUsage(15, 12)]
    labelled = [TextPair(text=LONG, text_pair="a"), "a", TextPair(text="a", text_pair=LONG)]
    assert prepared("text-classification", labelled).truncated == 2
    assert prepared("score", [LONG, "a", LONG], long_text="truncate").truncated == 2
    texts = [f"[MASK] {LONG}", "[MASK]", f"[MASK] {LONG}"]
    assert prepared("fill-mask", texts).truncated == 2
    questions = [QaPair(question="a", context=LONG), QaPair(question="b", context="a")]
    assert prepared("qa", questions, long_text="truncate").truncated == 1


def test_compared_texts_that_are_cut_are_counted() -> None:
    inputs = compared(LONG, "a", LONG)
    for details in (True, False):
        request = prepared("similarity", inputs, details=details, return_usage=True)
        assert request.truncated == 2
        assert request.usage == [TextUsage(13, 10), TextUsage(3, 3), TextUsage(13, 10)]
        assert prepared("similarity", inputs, details=details).usage is None


def test_spans_of_a_text_that_is_cut() -> None:
    request = prepared("embed", LONG, spans=[(0, 1)], return_usage=True)
    assert (request.truncated, request.usage) == (1, [TextUsage(13, 10)])
    with refused("invalid_value", 10, at="spans[1]"):
        prepared("embed", LONG, spans=[(0, 1), (16, 17)])
    kept = prepared("embed", LONG, spans=[(20, 21)], truncation_direction="left", normalize=False)
    rows = np.arange(10, dtype=np.float32)[:, None]
    [vector] = decoded("embed", kept, [{"token_embedding": ArrayResult(rows)}])
    assert vector.tolist() == [8]


@pytest.mark.parametrize(
    ("task", "inputs", "parameters", "rows"),
    [
        ("text-classification", ["a", "b"], {}, 2),  # one row per sequence
        ("text-classification", LONG, {"long_text": "window"}, 2),
        ("nsp", Pair(text="a", next="b"), {}, 1),
        ("embed", "a", {"layers": "concat-last-four"}, 4),
        ("embed-all", ["a", "b c"], {}, 3 + 4),  # one row per token
        ("qa", QaPair(question="a", context="b c"), {"top_k": 2}, 6 + 2),
        ("embed-sparse", ["a", "b"], {"top_k": 3}, 6),
        ("fill-mask", ["[MASK]", "[MASK] a [MASK]"], {"targets": ["sun", "moon", "red"]}, 9),
        ("fill-mask", "[MASK]", {"original": "sun"}, len(ID)),
        ("score", "a b", {}, 2),
    ],
)
def test_the_rows_of_an_answer_are_those_that_heads_return(
    task: str, inputs: Any, parameters: dict[str, Any], rows: int
) -> None:
    assert prepared(task, inputs, **parameters).answer_rows == rows


def test_a_row_that_is_shown_with_a_long_text_counts_more() -> None:
    wide = limited(max_tokens=512, max_text_characters=10_000, max_request_tokens=10**6)
    text = "[MASK] " + "a " * 317  # 320 tokens
    assert prepared("fill-mask", text, wide, top_k=3).answer_rows == 3 * 20
    assert prepared("token-classification", text, wide).answer_rows == 320


def test_written_sequences_are_limited_to_four_times_the_tokens() -> None:
    # 2 texts x 5 predictions x tokens per text: 2 masks x 3 tokens, 1 mask x 2 tokens.
    texts = ["[MASK] [MASK] a", "[MASK] a"]
    prepared("fill-mask", texts, limited(max_request_tokens=10))  # 30 + 10 written
    with refused("limit_exceeded", 40, 36):
        prepared("fill-mask", texts, limited(max_request_tokens=9))


def test_no_mask_has_more_predictions_than_the_vocabulary_has_tokens() -> None:
    wide = limited(max_top_k=10**6, max_results=10**6)
    prepared("fill-mask", "[MASK]", wide, top_k=len(ID))
    with refused("invalid_value", 1, len(ID), at="top_k"):
        prepared("fill-mask", "[MASK]", wide, top_k=len(ID) + 1)


@pytest.mark.parametrize(
    ("task", "parameters"),
    [
        ("embed", {"spans": [(0, 1)]}),
        ("redact", {"patterns": ["EMAIL"]}),
        ("entities", {"threshold": 0.2}),
        ("entities", {"threshold": 0.0}),
        ("fill-mask", {"decode": "beam"}),
        ("fill-mask", {"targets": ["a"], "targets_as": "words"}),
        ("fill-mask", {"original": "a"}),
    ],
)
def test_only_some_requests_take_long(task: str, parameters: dict[str, Any]) -> None:
    for name, one in TASKS.items():
        takes_long = name in ("score", "zero-shot-classification")
        assert one.needs_thread(one.parameters()) == takes_long, name
    fill = TASKS["fill-mask"]
    assert not fill.needs_thread(fill.parameters(targets=["a"]))
    assert TASKS[task].needs_thread(TASKS[task].parameters.model_validate(parameters))


@pytest.mark.parametrize(
    ("task", "inputs", "parameters"),
    [
        ("score", ["a", "b"], {}),
        ("embed", ["a", LONG], {"long_text": "window"}),
        ("embed-all", ["a", "b"], {}),
        ("nsp", [Pair(text="a", next="b"), Pair(text="b", next="a")], {}),
        ("similarity", compared("a", "b"), {}),
        ("text-classification", ["a", TextPair(text="a", text_pair="b"), LONG], {}),
        ("text-classification", ["a", LONG], {"long_text": "window"}),
        ("token-classification", ["a", LONG], {"long_text": "window"}),
    ],
)
def test_each_encoding_asks_the_head_of_the_task(
    task: str, inputs: Any, parameters: dict[str, Any]
) -> None:
    request = prepared(task, inputs, **parameters)
    asked = [tuple(encoding.requests) for encoding in request.encodings]
    assert asked == [TASKS[task].heads] * len(asked)


def test_windows_of_all_texts_are_limited_together() -> None:
    texts = [LONG, LONG]  # two windows of 12, then two of 10 tokens per text
    for task, need in (("text-classification", 48), ("embed", 40)):
        prepared(task, texts, limited(max_request_tokens=need), long_text="window")
        with refused("limit_exceeded", need, at="inputs[1]"):
            prepared(task, texts, limited(max_request_tokens=need - 1), long_text="window")


def test_each_pair_has_its_texts_even_if_they_repeat() -> None:
    pairs = [Pair(text="a", next="b"), Pair(text="a", next="c"), Pair(text="b", next="a")]
    request = prepared("nsp", pairs)
    assert tokens(request) == [f"[CLS] {one.text} [SEP] {one.next} [SEP]" for one in pairs]
    rows = ([1, 0], [0, 1], [3, 0])
    outputs = [{"next_sentence": ArrayResult(np.array(r, np.float32))} for r in rows]
    scores = [labels[0].score > 0.5 for labels in decoded("nsp", request, outputs)]
    assert scores == [True, False, True]
    request = prepared("nsp", Candidates(text="a", candidates=["b", "c"]))
    outputs = [{"next_sentence": ArrayResult(np.zeros(2, np.float32))}] * 2
    assert [one.index for one in decoded("nsp", request, outputs)] == [0, 1], "of equal score"


@pytest.mark.parametrize("targets_as", ["tokens", "words"])
def test_targets_of_equal_score_keep_their_order(targets_as: str) -> None:
    targets = ["sun", "a", "red"]
    request = prepared("fill-mask", "[MASK]", targets=targets, targets_as=targets_as)
    nothing = np.zeros((1, 0), np.float32)
    logits = np.zeros((1, 3 // len(request.encodings)), np.float32)
    result = MaskedLMResult(nothing, nothing.astype(int), np.ones(1, np.float32), logits)
    outputs = [{"masked_lm": result}] * len(request.encodings)
    assert [p.token_str for p in decoded("fill-mask", request, outputs)[0]] == targets


def test_each_original_belongs_to_its_text() -> None:
    request = prepared("fill-mask", ["a [MASK]", "b [MASK]"], original=["sun", "moon"], top_k=1)
    whole = np.zeros((1, len(ID)), np.float32)
    whole[0, ids("sun moon")] = [3, 2]
    result = MaskedLMResult(
        np.full((1, 1), 3, np.float32), np.array([ids("sun")]), np.full(1, 4, np.float32), whole
    )
    first, second = decoded("fill-mask", request, [{"masked_lm": result}] * 2)
    assert (first.original.token_str, first.original.rank) == ("sun", 1)
    assert (second.original.token_str, second.original.rank) == ("moon", 2)
    assert second.predictions[0].sequence == "b sun"
    with refused("invalid_value", 1, 2, at="inputs[1]"):
        prepared("fill-mask", ["[MASK]", "[MASK] [MASK]"], original=["a", "a"])


def test_a_model_without_a_recipe_reads_as_much_as_it_can() -> None:
    rest = [task for task in manifest().tasks if not task.startswith("embed")]
    model = context(tasks=rest, embedding=None)
    request = prepared("embed-sparse", LONG, model, return_usage=True)
    assert request.usage == [TextUsage(13, 12)]
    with refused("invalid_value", at="prompt_name"):
        prepared("embed-sparse", "a", model, prompt_name="query")


def test_parameters_that_are_left_out_have_no_value() -> None:
    for name, task in TASKS.items():
        assert set(task.parameters().model_dump().values()) <= {None}, name
