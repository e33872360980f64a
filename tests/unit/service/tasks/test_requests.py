"""What all tasks do with the texts of a request: names in errors, what was cut, what it costs."""

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.masked_lm import MaskedLMResult
from cloze.service.tasks import TASKS
from cloze.service.tasks.nsp import Candidates, Pair
from cloze.service.tasks.similarity import SimilarityInputs
from cloze.service.tasks.task import TextUsage
from tests.support.refusals import refused
from tests.support.task_model import ID, decoded, ids, prepared, tokens

LONG = "a b c d e f g h i j k"  # 13 tokens; the model reads 12, embeddings read 10


def compared(source: str, *sentences: str) -> SimilarityInputs:
    return SimilarityInputs(source_sentence=source, sentences=list(sentences))


@pytest.mark.parametrize("task", TASKS)
def test_a_task_takes_an_empty_list_for_no_text(task: str) -> None:
    """Only the task says that a list is empty: validation accepts the list."""
    inputs = compared("a") if task == "similarity" else []
    place = "inputs.sentences" if task == "similarity" else "inputs"
    with refused("empty_input", at=place):
        prepared(task, inputs)


def test_spans_of_a_text_that_is_cut() -> None:
    request = prepared("embed", LONG, spans=[(0, 1)], return_usage=True)
    assert (request.truncated, request.usage) == (1, [TextUsage(13, 10)])
    kept = prepared("embed", LONG, spans=[(20, 21)], truncation_direction="left", normalize=False)
    rows = np.arange(10, dtype=np.float32)[:, None]
    [vector] = decoded("embed", kept, [{"token_embedding": ArrayResult(rows)}])
    assert vector.tolist() == [8]


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


def test_parameters_that_are_left_out_have_no_value() -> None:
    for name, task in TASKS.items():
        assert set(task.parameters().model_dump().values()) <= {None}, name
