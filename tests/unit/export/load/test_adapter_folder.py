"""The settings of an adapter without its own."""

import numpy as np
import pytest

from cloze.export.load.adapter_folder import head_settings
from cloze.model_store.peft import AdapterFiles


@pytest.mark.parametrize(
    ("task", "classes"),
    [("SEQ_CLS", ["ForSequenceClassification"]), ("FEATURE_EXTRACTION", []), (None, [])],
)
def test_the_class_of_an_adapter_follows_from_its_task(
    task: str | None, classes: list[str]
) -> None:
    tensors = {"classifier.weight": np.zeros((3, 4), np.float32)}
    adapter = AdapterFiles({"task_type": task}, {}, tensors, {}, None, "")
    settings = head_settings(adapter, {"architectures": ["BertForMaskedLM"], "hidden_size": 4})
    assert settings["architectures"] == classes
    assert settings["hidden_size"] == 4
    assert settings["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
