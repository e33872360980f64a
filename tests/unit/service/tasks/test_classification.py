"""Sets of labels: their number, their names and their calibration."""

import pytest

from cloze.model_store.heads.sequence_classification import SequenceLabels
from cloze.service.errors import InvalidRequest
from tests.support.task_model import LABELS, context, prepared

NLI = {"labels": ("contradiction", "entailment"), "problem_type": "single_label_classification"}
TAGS = {"token_classification": {"labels": LABELS}}


TWO_SETS = {
    "name": "mood",
    "labels": ("bad", "good", "so"),
    "problem_type": "multi_label_classification",
    "further": [NLI | {"name": "inference"}],
}


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


def test_label_sets_have_names_that_differ_and_are_calibrated_by_name() -> None:
    with pytest.raises(ValueError, match="names that differ"):
        SequenceLabels.model_validate(TWO_SETS | {"name": "inference"})
    sets = SequenceLabels.model_validate(TWO_SETS)
    for name, expected in (("mood", [2.0, None]), ("inference", [None, 2.0])):
        assert [one.temperature for one in sets.calibrated(name, 2.0).sets] == expected
