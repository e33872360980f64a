"""Entities of the request's labels: the library's decodings, windows, limits, gliner's client."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from cloze.model_store import Store
from cloze.model_store.heads.entities import HEAD
from cloze.service.service import single_process
from cloze.service.settings import load_settings
from cloze.service.tasks import entities
from cloze.service.text.tokenizer import Tokenizer
from tests.support import gliner
from tests.support.bulk_runs import bulk, read, write
from tests.support.command import call
from tests.support.faulty import assert_close
from tests.support.released_clients import run
from tests.support.serving import running_server

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "build/gliner/bin/python"
TEXT = "Ada Lovelace worked with Charles Babbage in London."
LABELS = ["person", "city", "date of birth"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("store"))
    for kind in gliner.KINDS:
        gliner.export_kind(kind, store)
    return store.root


@pytest.fixture(scope="module")
def client(store: Path) -> Iterator[TestClient]:
    settings = load_settings({"model_store": store, "max_request_tokens": 20_000})
    with TestClient(single_process(settings), base_url="http://localhost") as client:
        yield client


def ask(client: TestClient, inputs: Any, model: str = "span", **parameters: Any) -> Any:
    parameters = {"labels": LABELS} | parameters
    body = {"inputs": inputs, "parameters": parameters, "model": model}
    return client.post("/entities", json=body).json()


def check_cases(client: TestClient, kind: str, cases: list[gliner.Case]) -> int:
    """Compare entities with those of the library, by all its decodings; return their number."""
    found = 0
    for case in cases:
        unique = list(dict.fromkeys(case.labels))
        for threshold, flat, multi, expected in case.decodings:
            asked = {"threshold": threshold, "flat_ner": flat, "multi_label": multi}
            answer = ask(client, case.text, kind, labels=case.labels, **asked)
            places = [[e["start"], e["end"], unique.index(e["label"])] for e in answer]
            assert places == expected, (kind, case.text)
            assert all(e["text"] == case.text[e["start"] : e["end"]] for e in answer)
            found += len(expected)
        scores = [one["score"] for one in ask(client, case.text, kind, labels=case.labels)]
        assert scores == pytest.approx(case.scores, abs=1e-5)
    return found


@pytest.mark.parametrize("kind", gliner.KINDS)
def test_the_entities_are_those_of_the_library(client: TestClient, kind: str) -> None:
    """Of all thresholds, flat and nested, with one label per span and several."""
    assert check_cases(client, kind, [*gliner.cases(kind)]) > 50


@pytest.mark.parametrize("kind", ["span", "bi"])
def test_front_ends_give_the_same_entities(store: Path, client: TestClient, kind: str) -> None:
    """A bi-encoder's vectors of labels are sent, computed and known."""
    parameters = {"labels": [*LABELS, "somewhere"], "threshold": 0.05}
    texts = [TEXT, "", "Rain in Paris"]
    with running_server(store, "--model", kind, "--frontends", "2") as server:
        body = {"inputs": texts, "parameters": parameters}
        answers = [httpx.post(f"{server.url}/entities", json=body).json() for _ in range(4)]
        redacting = {"labels": parameters["labels"], "min_score": 0.2}
        body = {"inputs": TEXT, "parameters": redacting}
        redacted = httpx.post(f"{server.url}/redact", json=body).json()
    expected = ask(client, texts, kind, **parameters)
    assert expected[0]
    assert redacted["replacements"]
    for answer in answers:
        assert_close(answer, expected)


def test_texts_of_one_request_are_answered_like_each_alone(client: TestClient) -> None:
    texts = [case.text for case in gliner.cases("projected")]
    answers = ask(client, [*texts, ""], "projected", threshold=0.1)
    assert answers == [ask(client, text, "projected", threshold=0.1) for text in [*texts, ""]]
    assert answers[-1] == ask(client, " \n ") == []


def test_labels_of_a_bi_encoder_are_read_once(client: TestClient) -> None:
    def tokens(*labels: str) -> int:
        body = {"inputs": TEXT, "parameters": {"labels": labels}, "model": "bi"}
        return int(client.post("/entities", json=body).headers["x-compute-tokens"])

    first = tokens("city", "a new label")
    of_text = tokens("a new label")
    assert tokens("city", "a new label") == of_text < first
    labels = [f"label {number}" for number in range(1000)]
    many = ask(client, TEXT, "bi", labels=[*labels, "city"][1:], threshold=0.2)
    one = ask(client, TEXT, "bi", labels=["city"], threshold=0.2, multi_label=True)
    assert set() < {e["label"] for e in many} <= {*labels, "city"}
    assert one
    assert ask(client, TEXT, "bi", labels=[*labels, "a"])["error"].startswith("labels has 1001")
    assert len(ask(client, [TEXT, "Rain"], "bi", labels=labels, threshold=0.9)) == 2


def test_no_client_learns_the_labels_of_another(client: TestClient) -> None:
    """Neither by the tokens that are counted nor by the time that they take."""
    other = TestClient(client.app, base_url="http://localhost", client=("10.0.0.2", 1))
    other.portal = client.portal
    body = {"inputs": TEXT, "parameters": {"labels": ["a secret", "a plan"]}, "model": "bi"}
    answers = [each.post("/entities", json=body) for each in (client, other, client, other)]
    tokens = [int(answer.headers["x-compute-tokens"]) for answer in answers]
    assert tokens[0] == tokens[1] > tokens[2] == tokens[3]


def test_bulk_runs_of_a_bi_encoder(store: Path, client: TestClient, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"text": TEXT}, {"text": "Rain"}])
    labels = [word for label in LABELS for word in ("--label", label)]
    found = tmp_path / "found"
    done = bulk(store, "entities", rows, "--model", "bi", *labels, "--output", found)
    assert done.exit_code == 0, done.output
    assert [row["entities"] for row in read(found)] == ask(client, [TEXT, "Rain"], "bi")


def test_descriptions_are_read_in_place_of_labels(client: TestClient) -> None:
    described = ask(client, TEXT, labels=dict(zip("abc", LABELS, strict=True)), threshold=0.1)
    named = ask(client, TEXT, threshold=0.1)
    assert described == [e | {"label": "abc"[LABELS.index(e["label"])]} for e in named] != []


def test_a_word_without_tokens_moves_no_other(client: TestClient) -> None:
    """WordPiece removes control characters; the library then shifts all later words."""
    plain = ask(client, TEXT, "marker", threshold=0.05)
    offset = len("\x01 ")
    moved = [one | {"start": one["start"] - offset, "end": one["end"] - offset}
             for one in ask(client, "\x01 " + TEXT, "marker", threshold=0.05)]  # fmt: skip
    assert moved == plain
    assert plain


def test_names_of_special_tokens_are_text(client: TestClient, store: Path) -> None:
    labels = ["<<ENT>>", "[SEP]", "city"]
    for kind in gliner.KINDS:
        bundle = Store(store).open(kind)
        options = bundle.manifest.heads[HEAD.name]
        special = {options.ent_id, options.sep_id}  # Unigram's own pieces have [SEP] as text too
        for ids in Tokenizer(bundle).word_ids(labels):
            assert ids, kind
            assert not special & {*ids}, kind
    for model in ("span", "token"):
        answer = ask(client, f"{TEXT} <<ENT>> [SEP]", model, labels=labels, threshold=0.01)
        assert {one["label"] for one in answer} <= {*labels}


@pytest.mark.parametrize("kind", ["span", "token", "marker", "bi"])
def test_a_long_text_is_cut_or_divided(client: TestClient, kind: str) -> None:
    """The marker kind reads 96 tokens; the others read 384 words."""
    text = f"{TEXT} Rain and {TEXT} " * 30
    cut = ask(client, text, kind, return_usage=True)
    divided = ask(client, text, kind, return_usage=True, long_text="window")
    assert cut["usage"][0]["used"] < cut["usage"][0]["tokens"] == divided["usage"][0]["used"]
    windows = divided["usage"][0]["windows"]
    assert all(end > start for (_, end), (start, _) in itertools.pairwise(windows))
    assert (windows[0][0], windows[-1][1]) == (0, len(text.strip()))
    for one in (found := divided["result"]):
        assert one["text"] == text[one["start"] : one["end"]]
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(found))
    assert max((one["start"] for one in found), default=windows[1][0]) >= windows[1][0]
    short = ask(client, TEXT, kind, threshold=0.2)
    assert ask(client, TEXT, kind, threshold=0.2, long_text="window") == short
    assert ask(client, text, kind, long_text="error")["code"] == "text_too_long"


@pytest.mark.parametrize(("labels", "code", "named"), [
    (["a " * 95, "b"], "text_too_long", "97 tokens; the model reads 96 of a"),
    (["b", "\x01"], "invalid_value", "labels[1] has no token"),
    ([f"{n} " * 12 for n in range(1000)], "limit_exceeded", "labels hold "),
])  # fmt: skip
def test_bad_labels_of_an_encoder_of_labels_are_refused_by_name(
    client: TestClient, labels: list[str], code: str, named: str
) -> None:
    """`error-wording.txt` has what the other kinds refuse too."""
    body = {"inputs": TEXT, "parameters": {"labels": labels}, "model": "bi"}
    answer = client.post("/entities", json=body)
    assert answer.headers["x-error-code"] == code, answer.text
    assert named in answer.json()["error"]


def test_costs_are_limited(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entities, "_MOST_SCORES", 80)
    asked = ask(client, [TEXT, TEXT])
    assert "words times labels times 4 per pair are 108; the limit of a" in asked["error"]
    monkeypatch.undo()
    monkeypatch.setattr(entities, "_MOST_CANDIDATES", 40)
    for kind in ("span", "token"):
        assert "exceed the threshold 0.0" in ask(client, TEXT, kind, threshold=0.0)["error"]
    monkeypatch.undo()
    monkeypatch.setattr(entities, "_MOST_CHARACTERS", 200)
    refused = ask(client, "a" * 100, threshold=0.0, multi_label=True)
    problem = "the entities and their labels have 2[01][0-9] characters or more; the limit of a"
    assert re.match(f"{problem} request is 200", refused["error"])
    assert len(ask(client, "a" * 201 + " " * 20, threshold=0.0)) == 1  # a text may be found once
    monkeypatch.undo()
    long = ask(client, f"{TEXT} " * 900, long_text="window")
    assert "the windows hold" in long["error"]


def test_gliners_own_route(client: TestClient) -> None:
    body = {"text": TEXT, "labels": LABELS, "threshold": 0.1, "model": "span"}
    answer = client.post("/gliner", json=body)
    assert answer.json() == {"entities": ask(client, TEXT, threshold=0.1)}


def test_redaction_of_any_labels(client: TestClient) -> None:
    def redact(text: str, **parameters: Any) -> Any:
        body = {"inputs": text, "parameters": parameters, "model": "span"}
        return client.post("/redact", json=body).json()

    text = f"{TEXT} Write to ada@example.org."
    found = ask(client, text, long_text="window", threshold=0.3)
    answer = redact(text, labels=LABELS, min_score=0.3, patterns=["EMAIL"])
    replaced = answer["replacements"]
    assert found
    for one in found:  # what overlaps is one place
        assert any(r["start"] <= one["start"] and one["end"] <= r["end"] for r in replaced)
    assert "ada@example.org" not in answer["text"]
    undone = text
    for one in reversed(replaced):
        undone = undone[: one["start"]] + one["placeholder"] + undone[one["end"] :]
    assert undone == answer["text"]


CLIENT = """
import json, sys
from gliner.serve.client import GLiNERClient, GLiNERClientError
client, [texts, labels] = GLiNERClient(sys.argv[1]), json.loads(sys.argv[2])
several = client.predict(texts, labels, threshold=0.1)
nested = dict(flat_ner=False, multi_label=True)
described = client.predict(texts[0], {"a": "person"}, threshold=0.05, **nested)
own = client.predict(texts, [labels, {"b": "city"}], threshold=0.1)
try:
    client.predict(texts[0], labels, relations=["works at"])
except GLiNERClientError as error:
    print(json.dumps([several, described, own, str(error)]))
"""


@pytest.mark.slow
def test_the_released_client_of_gliner(store: Path, client: TestClient) -> None:
    if not LIBRARY.exists():
        pytest.skip(f"no {LIBRARY}: run scripts/gliner-environment")
    texts = [TEXT, "Rain in Paris, said Grace Hopper."]
    with running_server(store, "--model", "span") as server:
        arguments = [server.url, json.dumps([texts, LABELS])]
        done = call(str(LIBRARY), "-c", CLIENT, *arguments, check=False)
    assert done.returncode == 0, done.stderr
    several, described, own, error = json.loads(done.stdout)

    def expected(text: str, labels: Any, **parameters: Any) -> Any:
        entities = ask(client, text, labels=labels, **parameters)
        assert entities
        return {"entities": [e | {"score": pytest.approx(e["score"], abs=1e-5)} for e in entities]}

    assert several == [expected(text, LABELS, threshold=0.1) for text in texts]
    nested = {"flat_ner": False, "multi_label": True, "threshold": 0.05}
    assert described == expected(texts[0], {"a": "person"}, **nested)
    second = expected(texts[1], {"b": "city"}, threshold=0.1)
    assert own == [expected(texts[0], LABELS, threshold=0.1), second]
    assert "400" in error


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_presidio_and_spacy(store: Path, client: TestClient, tmp_path: Path) -> None:
    """With the code of docs/clients.md; a test that cannot install them skips and says why."""
    arguments = "entity_components.py", "presidio.txt", tmp_path / "environment"
    with running_server(store, "--model", "span") as server:
        found = run(*arguments, str(ROOT / "docs/clients.md"), server.url, TEXT)
    labels = {"PERSON": "person", "LOCATION": "city"}

    def rows(**parameters: Any) -> list[Any]:
        entities = ask(client, TEXT, long_text="window", **parameters)
        assert entities
        return [
            [e["start"], e["end"], e["label"], pytest.approx(e["score"], abs=1e-5)]
            for e in entities
        ]

    assert sorted(found["presidio"]) == rows(labels=labels, threshold=0.3)
    assert found["spacy"] == rows(labels=["person", "city"])
    assert found["empty"] == 0


def check_like_library(folder: Path, kinds: tuple[str, ...], seed: int = 0) -> int:
    """Export checkpoints that are not committed, and compare what they find with the library.

    Returns the most tokens of a text.
    """
    store, longest = Store(folder / f"store-{seed}-{kinds[0]}"), 0
    for kind in kinds:
        gliner.export_kind(kind, store, folder, seed)
    service = single_process(load_settings({"model_store": store.root}))
    with TestClient(service, base_url="http://localhost") as client:
        for kind in kinds:
            cases = [*gliner.cases(kind, folder, seed)]
            check_cases(client, kind, cases)
            longest = max([longest, *(len(case.ids) for case in cases)])
    return longest


def make_checkpoints(folder: Path, *arguments: str) -> None:
    """Run the script that makes checkpoints and records what the library finds."""
    if not LIBRARY.exists():
        pytest.skip(f"no {LIBRARY}: run scripts/gliner-environment")
    command = [str(LIBRARY), str(ROOT / "scripts/gliner-fixtures"), str(folder), *arguments]
    call(*command)


@pytest.mark.slow
def test_checkpoints_of_other_seeds(tmp_path: Path) -> None:
    make_checkpoints(tmp_path, "--seeds", "3")
    for seed in (1, 2):
        check_like_library(tmp_path, gliner.KINDS, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_families_of_encoders_and_long_texts(tmp_path: Path) -> None:
    """mDeBERTa, Ettin and a NuNER Zero read more than 520 tokens; the others fewer."""
    long, short = ("mdeberta", "ettin", "nuner-zero"), ("modernbert", "bert")
    make_checkpoints(tmp_path, "--long", "--kinds", *long)
    make_checkpoints(tmp_path, "--kinds", *short)
    assert check_like_library(tmp_path, long) > 520
    check_like_library(tmp_path, short)
