"""API keys that are limited to adapters: what exists for them, in every protocol."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import BertForPreTraining

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.service.errors import StartupError
from cloze.service.http.keys import Keys
from tests.support.adapter_folders import Recipe, classifier, write
from tests.support.command import cloze, cloze_here
from tests.support.refusals import error_of
from tests.support.serving import running_server

KEYS = {
    "everyone": (),
    "tenant": ("topics", "vectors@1"),
    "tagger": ("names",),
    "early": ("not-yet-served",),
}
TEXT = "the film was good"
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    file, made = tmp_path_factory.mktemp("keys") / "keys.toml", {}
    for name, models in KEYS.items():
        flags = [flag for model in models for flag in ("--model", model)]
        made[name] = cloze("keys", "add", name, "--file", str(file), *flags).stdout.strip()
    return file, made


@pytest.fixture(scope="module")
def ask(
    tmp_path_factory: pytest.TempPathFactory,
    checkpoints: dict[str, Path],
    keys: tuple[Path, dict[str, str]],
) -> Iterator[Ask]:
    """Return a function that sends a request with the key of a name."""
    root, folder = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("adapters")
    options = ExportOptions(adapters=("query", "value"))
    export(str(checkpoints["bert"]), "base", Store(root), options)
    model = BertForPreTraining.from_pretrained(checkpoints["bert"]).eval()
    recipes = {
        "names": Recipe(4, task="TOKEN_CLS", head={"classifier": (3, 64)}),
        "stars": classifier(1),
        "topics": classifier(2),
        "vectors": Recipe(5),
    }
    for name, recipe in recipes.items():
        write(folder / name, recipe, model)
    flags = ("--adapter", str(folder), "--keys-file", str(keys[0]), "--precision", "fp32")
    with running_server(root, *flags) as server, httpx.Client(base_url=server.url) as client:

        def send(name: str, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[1][name]}"}
            method = "GET" if body is None else "POST"
            return client.request(method, path, json=body, headers=headers)

        yield send


def test_only_its_models_exist_for_a_key(ask: Ask) -> None:
    rows = {name: ask(name, "/v1/models").json()["data"] for name in ("everyone", "tenant")}
    assert [row["id"] for row in rows["tenant"]] == ["topics@1", "topics", "vectors@1", "vectors"]
    assert len(rows["everyone"]) == 10
    info = ask("tenant", "/info").json()
    assert [model["name"] for model in info["models"]] == ["topics", "vectors"]
    assert set(info["defaults"].values()) == {"topics@1", "vectors@1"}
    names = ask("tagger", "/v2/models").json()["models"]
    assert names == ["names.token-classification", "names.redact"]
    assert ask("tenant", "/v1/models/topics").status_code == 200
    for path in ("/v1/models/stars", "/v2/models/stars.text-classification", "/v1/models/base"):
        refused = ask("tenant", path)
        assert error_of(refused) == (404, "model_not_found")
        assert "is served to this key (there: topics, topics@1, vectors, vectors@1)" in refused.text


def test_a_key_gets_the_results_of_its_adapters_and_of_no_other(ask: Ask) -> None:
    texts = {"inputs": TEXT}
    topics, stars = (
        ask("everyone", "/classify", texts | {"model": name}).json() for name in ("topics", "stars")
    )
    assert ask("everyone", "/classify", texts).json() == stars != topics
    assert ask("tenant", "/classify", texts).json() == topics  # its own default
    assert ask("tenant", "/predict", texts).json() == topics[0]
    assert ask("tenant", "/", texts | {"parameters": {"top_k": 3}}).json() == topics
    assert ask("everyone", "/", texts | {"parameters": {"top_k": 3}}).status_code == 422
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    for name, status in (("topics", 200), ("stars", 404)):
        path = f"/v2/models/{name}.text-classification/infer"
        assert ask("tenant", path, {"inputs": [tensor]}).status_code == status
        assert ask("tenant", "/classify", texts | {"model": name}).status_code == status
        assert ask("tenant", "/predict", texts | {"model": name}).status_code == status
        assert ask("tenant", "/tokenize", texts | {"model": name}).status_code == status
    for model, status in (("vectors", 200), ("base", 404)):
        body = {"input": TEXT, "model": model}
        assert ask("tenant", "/v1/embeddings", body).status_code == status
    refused = ask("tagger", "/classify", texts)
    assert error_of(refused) == (424, "task_not_supported")


def test_a_key_of_models_that_are_not_served_is_refused(ask: Ask) -> None:
    for path, body in (("/v1/models", None), ("/info", None), ("/embed", {"inputs": TEXT})):
        refused = ask("early", path, body)
        assert error_of(refused) == (403, "forbidden")


def test_a_malformed_name_is_refused_by_the_command_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    refused = cloze_here("keys", "add", "a", "--file", str(file), "--model", "../stars")
    assert (refused.exit_code, file.exists()) == (2, False)
    for models in ('["a@0"]', "[]", '"stars"'):
        text = f'[k]\nsha256 = "{"0" * 64}"\nscopes = ["inference"]\nmodels = {models}\n'
        file.write_text(text)
        with pytest.raises(StartupError, match=r"keys.toml: models"):
            Keys(file)
