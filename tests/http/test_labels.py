"""Labels of texts and tokens, and labels of one's own: the answers of transformers' pipelines."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from huggingface_hub import InferenceClient
from transformers import AutoTokenizer, PreTrainedModel

from cloze.export.publish import export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.faulty import assert_close
from tests.support.serving import Server, running_server

LIMIT = 160
LONG = "year time door green [MASK] answers " * 40
TEXTS = ["paris is red", "Walking timely doors: Ünknöwn 北京 waters!", LONG]
PAIRS = [("paris is red", "the house"), ("red " * 120, "green " * 130)]
CANDIDATES = ["the door", "red", "a green moon over the sea", "walk"]
GRADES = {"id2label": dict(enumerate(["bad", "fair", "good"]))}
TAGS = {"id2label": dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC", "misc"]))}


def inference(*labels: str) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}


# Name -> class of transformers, and settings.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "single": ("BertForSequenceClassification", GRADES),
    "multi": ("DistilBertForSequenceClassification",
              GRADES | {"problem_type": "multi_label_classification"}),
    "regression": ("BertForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "one-label": ("DistilBertForSequenceClassification", {"num_labels": 1}),
    "tags": ("BertForTokenClassification", TAGS),
    "tags-distilbert": ("DistilBertForTokenClassification", TAGS),
    "last": ("BertForSequenceClassification", inference("contradiction", "neutral", "ENTAILMENT")),
    "first": ("BertForSequenceClassification", inference("entailment", "neutral", "contradiction")),
    "two": ("DistilBertForSequenceClassification", inference("not_entailment", "Entailed")),
}  # fmt: skip
CLASSIFIERS, TAGGERS, INFERENCES = list(KINDS)[:4], list(KINDS)[4:6], list(KINDS)[6:]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, folders = tmp_path_factory.mktemp("labels"), {}
    for name, (model, settings) in KINDS.items():
        kind = f"{'distilbert' if 'Distil' in model else 'bert'}-of-{name}"
        tiny.CLASSES[kind] = getattr(transformers, model)
        folders[name] = tiny.save_checkpoint(root / name, kind, **settings)
    return folders


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[Server]:
    store = tmp_path_factory.mktemp("store")
    for name, folder in folders.items():
        export(str(folder), name, Store(store))
    models = [flag for name in KINDS for flag in ("--model", name)]
    with running_server(store, *models, "--precision", "fp32") as server:
        yield server


def ask(server: Server, route: str, model: str, inputs: Any, **parameters: Any) -> httpx.Response:
    body = {"inputs": inputs, "model": model, "parameters": parameters}
    answer = httpx.post(server.url + route, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def pipeline(folder: Path, kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=LIMIT)
        model: PreTrainedModel = getattr(transformers, KINDS[folder.name][0])
        return getattr(transformers, f"{kind}Pipeline")(
            model=model.from_pretrained(folder), tokenizer=tokenizer, device="cpu"
        )


def plain(value: Any) -> Any:
    """Return a result of transformers with Python's own numbers."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return getattr(value, "item", lambda: value)()


@pytest.mark.parametrize("model", CLASSIFIERS)
@pytest.mark.parametrize(
    "parameters",
    [{}, {"top_k": 2}, {"function_to_apply": "sigmoid"}, {"function_to_apply": "none"}],
)
def test_labels_of_texts_are_those_of_transformers(
    server: Server, folders: dict[str, Path], model: str, parameters: dict[str, Any]
) -> None:
    oracle = pipeline(folders[model], "TextClassification")
    inputs: list[Any] = [*TEXTS, *({"text": a, "text_pair": b} for a, b in PAIRS)]
    answer = ask(server, "/classify", model, inputs, **parameters)
    assert answer.headers["x-truncated"] == "2"  # the long text, and the long pair
    for text, ours in zip(inputs, answer.json(), strict=True):
        theirs = oracle(text, truncation=True, **{"top_k": None} | parameters)
        assert_close(ours, plain(theirs))


@pytest.mark.parametrize("model", TAGGERS)
@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("extra", [{}, {"ignore_labels": ["O", "misc"]}], ids=["all", "ignored"])
def test_entities_are_those_of_transformers(
    server: Server, folders: dict[str, Path], model: str, strategy: str, extra: dict[str, Any]
) -> None:
    oracle, asked = (
        pipeline(folders[model], "TokenClassification"),
        {"aggregation_strategy": strategy},
    )
    answer = ask(server, "/token-classification", model, TEXTS, **asked, **extra)
    assert answer.headers["x-truncated"] == "1"
    for text, ours in zip(TEXTS, answer.json(), strict=True):
        assert_close(ours, plain(oracle(text, **asked, **extra)))


@pytest.mark.parametrize("stride", [0, 100])
@pytest.mark.parametrize("strategy", ["simple", "average"])
def test_long_texts_in_windows_are_those_of_transformers(
    server: Server, folders: dict[str, Path], stride: int, strategy: str
) -> None:
    asked = {"aggregation_strategy": strategy, "stride": stride}
    answer = ask(server, "/token-classification", "tags", LONG, **asked)
    assert answer.headers["x-truncated"] == "0"
    assert int(answer.headers["x-compute-tokens"]) > LIMIT
    oracle = pipeline(folders["tags"], "TokenClassification")
    assert_close(answer.json(), plain(oracle(LONG, **asked)))


@pytest.mark.parametrize("parameters", [
    {}, {"multi_label": True}, {"candidate_labels": ["red"]},
    {"hypothesis_template": "{} is the king of the house"},
])  # fmt: skip
@pytest.mark.parametrize("model", INFERENCES)
def test_scores_of_own_labels_are_those_of_transformers(
    server: Server, folders: dict[str, Path], model: str, parameters: dict[str, Any]
) -> None:
    oracle = pipeline(folders[model], "ZeroShotClassification")
    asked = {"candidate_labels": CANDIDATES} | parameters
    answers = ask(server, "/zero-shot-classification", model, TEXTS, **asked).json()
    for text, answer in zip(TEXTS, answers, strict=True):
        theirs = oracle(text, **asked)
        pairs = zip(theirs["labels"], theirs["scores"], strict=True)
        assert_close(answer, [{"label": label, "score": score} for label, score in pairs])


def test_the_released_client_of_hugging_face_reads_answers(server: Server) -> None:
    """The client names no model: the first one that has the task answers."""

    def client(route: str) -> InferenceClient:
        return InferenceClient(server.url + route, timeout=30)

    labels = client("/classify").text_classification(TEXTS[0])
    [expected] = ask(server, "/classify", "single", [TEXTS[0]]).json()
    assert [{"label": row.label, "score": row.score} for row in labels] == expected
    route, simple = "/token-classification", {"aggregation_strategy": "simple"}
    found = client(route).token_classification(TEXTS[0], **simple)
    expected = ask(server, route, "tags", TEXTS[0], **simple).json()
    assert [(e.entity_group, e.start, e.score) for e in found] == [
        (e["entity_group"], e["start"], e["score"]) for e in expected
    ]
    route = "/zero-shot-classification"
    own = {"candidate_labels": CANDIDATES, "multi_label": True}
    expected = ask(server, route, "last", TEXTS[0], **own).json()
    for asked in (client(route), InferenceClient(base_url=server.url)):
        answer = asked.zero_shot_classification(TEXTS[0], CANDIDATES, multi_label=True)
        assert_close([{"label": row.label, "score": row.score} for row in answer], expected)
