"""Labels of texts and of tokens, next sentences and scores of texts, from outputs by hand."""

import math
from typing import Any

import numpy as np
import pytest

from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.masked_lm import MaskedLMResult
from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.service.errors import InvalidRequest
from cloze.service.tasks.nsp import Candidates, Pair
from cloze.service.tasks.task import TextUsage
from tests.support.task_model import LABELS, context, decoded, ids, prepared, tokens, types

ELEVEN = "a b c d e f g h i j k"
NLI = {"labels": ("contradiction", "entailment"), "problem_type": "single_label_classification"}
TAGS = {"token_classification": {"labels": LABELS}}


def label_outputs(*rows: list[float]) -> list[dict[str, Any]]:
    name = "sequence_classification"
    return [{name: ArrayResult(np.array(row, np.float32))} for row in rows]


def softmax(row: list[float]) -> list[float]:
    total = sum(map(math.exp, row))
    return [math.exp(value) / total for value in row]


def test_labels_are_ranked_by_their_softmax() -> None:
    request = prepared("text-classification", ["the door", "a"])
    assert tokens(request) == ["[CLS] the door [SEP]", "[CLS] a [SEP]"]
    logits = label_outputs([1, 3, 0, 2], [2000, 0, -2000, 1])
    labels, large = decoded("text-classification", request, logits)
    assert [one.label for one in labels] == ["B-PER", "LOC", "O", "I-PER"]
    assert [one.score for one in labels] == pytest.approx(softmax([3, 2, 1, 0]), rel=1e-5)
    assert (large[0].label, large[0].score) == ("O", 1), "without overflow"


def test_fewer_labels_and_other_functions() -> None:
    def labels(function: str, top_k: int) -> Any:
        request = prepared("text-classification", "the", top_k=top_k, function_to_apply=function)
        return decoded("text-classification", request, label_outputs([1, 3, 0, 2]))[0]

    assert [one.label for one in labels("sigmoid", 2)] == ["B-PER", "LOC"]
    assert labels("sigmoid", 1)[0].score == pytest.approx(1 / (1 + math.exp(-3)))
    assert labels("none", 1)[0].score == 3


@pytest.mark.parametrize(
    ("problem", "score"),
    [
        ("single_label_classification", softmax([3, 2, 1, 0])[0]),
        ("multi_label_classification", 1 / (1 + math.exp(-3))),
        ("regression", 3.0),
    ],
)
def test_the_function_follows_from_the_problem_type(problem: str, score: float) -> None:
    model = context(
        heads=TAGS | {"sequence_classification": {"labels": LABELS, "problem_type": problem}}
    )
    request = prepared("text-classification", "the", model)
    [labels] = decoded("text-classification", request, label_outputs([1, 3, 0, 2]), model)
    assert labels[0].score == pytest.approx(score)


def test_windows_of_a_long_text_have_the_mean_of_their_scores() -> None:
    parameters = {"long_text": "window", "function_to_apply": "none"}
    request = prepared("text-classification", ["a", ELEVEN], **parameters)
    logits = label_outputs([1, 2, 3, 4], [4, 0, 0, 2], [0, 1, 0, 6])
    one, long = decoded("text-classification", request, logits)
    assert next((x.label, x.score) for x in one) == ("LOC", 4)
    assert [(x.label, x.score) for x in long] == [
        ("LOC", 4), ("O", 2), ("B-PER", 0.5), ("I-PER", 0),
    ]  # fmt: skip


def pair_outputs(*rows: list[float]) -> list[dict[str, Any]]:
    return [{"next_sentence": ArrayResult(np.array(row, np.float32))} for row in rows]


def test_a_pair_has_two_labels() -> None:
    request = prepared("nsp", Pair(text="the door", next="red"), return_usage=True)
    assert tokens(request) == ["[CLS] the door [SEP] red [SEP]"]
    assert types(request) == [[0, 0, 0, 0, 1, 1]]
    assert request.usage == [TextUsage(6, 6)]
    [labels] = decoded("nsp", request, pair_outputs([2, 1]))
    assert [one.label for one in labels] == ["IsNext", "NotNext"]
    assert [one.score for one in labels] == pytest.approx(softmax([2, 1]), rel=1e-5)
    [labels] = decoded("nsp", request, pair_outputs([2000, -2000]))
    assert [one.score for one in labels] == [1, 0]


def test_candidates_are_ranked() -> None:
    request = prepared("nsp", Candidates(text="the", candidates=["a", "b", "c"]))
    ranked = decoded("nsp", request, pair_outputs([0, 1], [2, 1], [1, 1]))
    assert [(one.index, one.text) for one in ranked] == [(1, "b"), (2, "c"), (0, "a")]
    assert ranked[1].score == pytest.approx(0.5)


def log_probabilities(*values: float) -> list[dict[str, Any]]:
    nothing = np.zeros((1, 0), np.float32)
    return [
        {
            "masked_lm": MaskedLMResult(
                nothing, nothing, np.array([5.0], np.float32), np.array([[5 + v]], np.float32)
            )
        }
        for v in values
    ]


def test_each_token_is_scored_behind_a_mask() -> None:
    request = prepared("score", ["the reds", "a"], return_usage=True)
    assert tokens(request) == [
        "[CLS] [MASK] red ##s [SEP]",
        "[CLS] the [MASK] ##s [SEP]",
        "[CLS] the red [MASK] [SEP]",
        "[CLS] [MASK] [SEP]",
    ]
    asked = [encoding.requests["masked_lm"] for encoding in request.encodings]
    assert [list(one.positions) for one in asked] == [[1], [2], [3], [1]]
    assert [list(one.targets) for one in asked] == [[i] for i in ids("the red ##s a")]
    assert (request.usage, request.truncated) == ([TextUsage(5, 5), TextUsage(3, 3)], 0)
    score, other = decoded("score", request, log_probabilities(-1, -2, -4, -3))
    assert (score.score, other.score) == (pytest.approx(-7), -3)
    assert [(t.token, t.start, t.end, t.log_probability) for t in score.tokens] == [
        ("the", 0, 3, -1), ("red", 4, 7, -2), ("##s", 7, 8, -4),
    ]  # fmt: skip


def token_outputs(*windows: list[list[float]]) -> list[dict[str, Any]]:
    """Return outputs whose softmax are the given scores; [CLS] and [SEP] get no sense."""
    other = [1e-9, 1e-9, 1e-9, 1.0]
    return [
        {
            "token_classification": ArrayResult(
                np.log(np.array([other, *window, other], np.float32)) + 3
            )
        }
        for window in windows
    ]


OUT = [0.97, 0.01, 0.01, 0.01]
BEGIN = [0.1, 0.7, 0.1, 0.1]
IN = [0.1, 0.1, 0.7, 0.1]
LOC = [0.1, 0.1, 0.1, 0.7]


def entities_of(text: str, rows: list[list[float]], **parameters: Any) -> Any:
    request = prepared("token-classification", text, **parameters)
    [entities] = decoded("token-classification", request, token_outputs(rows))
    return entities


def groups(text: str, rows: list[list[float]], **parameters: Any) -> list[Any]:
    entities = entities_of(text, rows, **parameters)
    return [(e.entity_group, e.word, e.start, e.end) for e in entities]


def test_neighbours_of_one_label_are_one_entity() -> None:
    assert groups("the red door by paris", [OUT, BEGIN, IN, OUT, LOC]) == [
        ("PER", "red door", 4, 12),
        ("LOC", "paris", 16, 21),
    ]
    [entity] = entities_of("a b", [[0.1, 0.8, 0.05, 0.05], [0.1, 0.2, 0.6, 0.1]])
    assert entity.score == pytest.approx(0.7, rel=1e-4), "the mean of its tokens"


def test_b_begins_a_new_entity_and_i_may_begin_one() -> None:
    assert groups("a b c", [BEGIN, BEGIN, IN]) == [("PER", "a", 0, 1), ("PER", "b c", 2, 5)]
    assert groups("a b c", [IN, IN, LOC]) == [("PER", "a b", 0, 3), ("LOC", "c", 4, 5)]
    assert groups("a b c", [LOC, LOC, OUT]) == [("LOC", "a b", 0, 3)]


def test_labels_may_be_ignored() -> None:
    assert groups("a b", [OUT, LOC], ignore_labels=["LOC"]) == [("O", "a", 0, 1)]
    assert groups("a b", [OUT, LOC], ignore_labels=[]) == [("O", "a", 0, 1), ("LOC", "b", 2, 3)]


@pytest.mark.parametrize(
    ("strategy", "label"), [("simple", None), ("first", "PER"), ("average", "LOC"), ("max", "LOC")]
)
def test_a_word_gets_one_label(strategy: str, label: str | None) -> None:
    # "reds" has two pieces. The first is rather B-PER, the second clearly LOC.
    first, second = [0.1, 0.5, 0.0001, 0.4], [0.01, 0.01, 0.01, 0.97]
    found = groups("reds", [first, second], aggregation_strategy=strategy)
    if label is None:
        assert found == [("PER", "red", 0, 3), ("LOC", "##s", 3, 4)]
    else:
        assert found == [(label, "reds", 0, 4)]


def test_every_token_is_a_result_if_asked() -> None:
    entities = entities_of("the reds", [OUT, BEGIN, LOC], aggregation_strategy="none")
    assert [(e.entity, e.index, e.word, e.start, e.end) for e in entities] == [
        ("B-PER", 2, "red", 4, 7),
        ("LOC", 3, "##s", 7, 8),
    ]
    assert entities[0].score == pytest.approx(0.7, rel=1e-4)


def test_an_unknown_token_is_shown_as_it_stands() -> None:
    assert groups("a \N{SNOWMAN}", [OUT, LOC]) == [("LOC", "\N{SNOWMAN}", 2, 3)]


def test_windows_give_one_entity_where_they_overlap() -> None:
    request = prepared("token-classification", ELEVEN, stride=4, return_usage=True)
    assert tokens(request) == ["[CLS] a b c d e f g h i j [SEP]", "[CLS] g h i j k [SEP]"]
    assert request.usage == [TextUsage(13, 13, [(0, 19), (12, 21)])]
    first = [OUT] * 6 + [BEGIN, IN, OUT, LOC]  # "g h" and "j"
    second = [BEGIN, IN, IN, OUT, OUT]  # "g h i": longer
    [entities] = decoded("token-classification", request, token_outputs(first, second))
    assert [(e.entity_group, e.word) for e in entities] == [("PER", "g h i"), ("LOC", "j")]
    surer = [0.01, 0.01, 0.01, 0.97]
    first, second = [OUT] * 6 + [LOC, OUT, OUT, OUT], [surer, OUT, OUT, OUT, LOC]
    [entities] = decoded("token-classification", request, token_outputs(first, second))
    assert [(e.word, round(e.score, 2)) for e in entities] == [("g", 0.97), ("k", 0.7)]


TWO_SETS = {
    **TAGS,
    "sequence_classification": {
        "name": "mood",
        "labels": ("bad", "good", "so"),
        "problem_type": "multi_label_classification",
        "further": [NLI | {"name": "inference"}],
    },
}
ZERO_SHOT = "zero-shot-classification"


def test_the_entailment_of_a_further_label_set_decides() -> None:
    """The logits of the first set lie before those of the set that has the entailment."""
    with_sets = context(heads=TWO_SETS)
    request = prepared(
        ZERO_SHOT, "a", with_sets, candidate_labels=["x", "y"], hypothesis_template="{}"
    )
    assert tokens(request) == ["[CLS] a [SEP] x [SEP]", "[CLS] a [SEP] y [SEP]"]
    outputs = label_outputs([9, -9, 9, 0, 1], [-9, 9, -9, 0, 3])
    [labels] = decoded(ZERO_SHOT, request, outputs, with_sets)
    assert [one.label for one in labels] == ["y", "x"]
    assert [one.score for one in labels] == pytest.approx(softmax([3, 1]), rel=1e-5)


def test_a_label_alone_is_judged_against_its_contradiction() -> None:
    """The first label entails, so the last one contradicts, as in transformers."""
    labels = {"labels": ("ENTAILMENT", "neutral", "contradiction")}
    model = context(heads=TAGS | {"sequence_classification": NLI | labels})
    named = {"candidate_labels": ["red"], "hypothesis_template": "the {}"}
    request = prepared(ZERO_SHOT, "a", model, **named)
    [[best]] = decoded(ZERO_SHOT, request, label_outputs([1, 50, 0]), model)
    assert best.score == pytest.approx(1 / (1 + math.exp(-1)))


def test_thousands_of_label_sets_cost_little() -> None:
    """An error names the first of them, and choosing one looks at each set once."""
    further = [NLI | {"name": f"set-{number}"} for number in range(3000)]
    sets = {"sequence_classification": NLI | {"name": "first", "further": further}}
    with_sets = context(heads=TAGS | sets)
    request = prepared("text-classification", "a", with_sets, label_set="set-2999")
    assert request.state.logits == slice(6000, 6002)
    with pytest.raises(InvalidRequest) as raised:
        prepared("text-classification", "a", with_sets, label_set="other")
    assert len(str(raised.value)) < 400


def test_without_a_name_the_first_label_set_answers() -> None:
    with_sets = context(heads=TWO_SETS)
    for named, logits in ((None, slice(0, 3)), ("mood", slice(0, 3)), ("inference", slice(3, 5))):
        request = prepared("text-classification", "a", with_sets, label_set=named)
        assert request.state.logits == logits


def test_label_sets_have_names_that_differ_and_are_calibrated_by_name() -> None:
    described = TWO_SETS["sequence_classification"]
    with pytest.raises(ValueError, match="names that differ"):
        SequenceLabels.model_validate(described | {"name": "inference"})
    sets = SequenceLabels.model_validate(described)
    for name, expected in (("mood", [2.0, None]), ("inference", [None, 2.0])):
        assert [one.temperature for one in sets.calibrated(name, 2.0).sets] == expected
