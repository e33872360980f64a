"""Settings: flag over environment over default; a bad one is one clear line; the document is
the class.
"""

import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from cloze.export.publish import export
from cloze.model_store import Store
from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.machine import available_cpus
from cloze.service.service import single_process
from cloze.service.settings import load_settings, unknown_variables
from tests.support.fake_engine import FakeEngine

pytestmark = pytest.mark.usefixtures("no_variables")


def test_flags_win_over_the_environment_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_settings().port == 8000
    monkeypatch.setenv("CLOZE_PORT", "9000")
    assert load_settings().port == 9000
    assert load_settings({"port": "9001", "host": None}).port == 9001


def test_models_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_MODEL", "a, b@2,")
    assert load_settings().model == ("a", "b@2")
    assert load_settings({"model": ("c", "d")}).model == ("c", "d")


def test_a_bad_value_names_its_variable_or_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(StartupError, match=r"^CLOZE_PORT: .*'tcp://10.0.0.1:8000'$"):
        load_settings()
    monkeypatch.delenv("CLOZE_PORT")
    with pytest.raises(StartupError, match=r"^--max-top-k: .*got '0'$"):
        load_settings({"max_top_k": "0"})


def test_misspelt_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLOZE_PROT", "CLOZE_PORT", "CLOZE_URL", "CLOZE_KEY"):  # the last are of clients
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == ["CLOZE_PROT"]


def test_workers_default_to_the_cores_there_are() -> None:
    assert 1 <= available_cpus() == load_settings().worker_count(Device.CPU)
    assert load_settings({"workers": 3}).worker_count(Device.CPU) == 3
    assert load_settings().worker_count(Device.CUDA) == 2
    assert load_settings({"intra_op_threads": 1000}).worker_count(Device.CPU) == 1


def defaults(store: Path, **settings: object) -> dict[str, str]:
    """Return the default model of each task of a service with these settings."""
    chosen = load_settings({"model_store": store, **settings})
    service = single_process(chosen, lambda *_: FakeEngine())
    with TestClient(service, base_url="http://localhost") as client:
        return dict(client.get("/info").json()["defaults"])


def test_the_default_of_a_task_is_stated(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_DEFAULT_FILL_MASK", "distilbert")
    monkeypatch.setenv("CLOZE_DEFAULT", "embed=distilbert@1, nsp=bert")
    assert unknown_variables() == []
    found = {"fill-mask": "distilbert@1", "embed": "distilbert@1", "nsp": "bert@1"}
    assert defaults(tiny_store).items() >= found.items()


def test_without_a_statement_the_oldest_name_answers(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    for kind, name in (("distilbert", "zebra"), ("bert", "aardvark"), ("distilbert", "zebra")):
        export(str(checkpoints[kind]), name, Store(tmp_path))
        time.sleep(1)  # manifests have whole seconds
    assert defaults(tmp_path)["embed"] == "zebra@2"
    assert defaults(tmp_path, model=("aardvark", "zebra"))["embed"] == "aardvark@1"


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DEFAULT", "embed", "'embed' is not TASK=NAME"),
        ("DEFAULT", "embed=bert,embed=distilbert", "the task 'embed' has two defaults"),
        ("DEFAULT", "embed=x", "default of embed: no model 'x' is served"),
        ("DEFAULT", "nsp=distilbert", "default of nsp: model distilbert cannot do nsp"),
        ("ALIAS", "bert", "'bert' is not ALIAS=NAME"),
        ("ALIAS", "a b=bert", "'a b=bert' is not ALIAS=NAME"),
        ("ALIAS", "a=bert,a=distilbert", "the alias 'a' has two models"),
        ("ALIAS", "a=x", r"alias a: no model 'x' is served \(there: bert, "),
        ("ALIAS", "a=bert,b=a", "alias b: no model 'a' is served"),
        ("ALIAS", "bert=distilbert", "alias bert: a served model has this name"),
    ],
)
def test_a_wrong_name_of_a_model_stops_the_start(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(f"CLOZE_{variable}", value)
    with pytest.raises(StartupError, match=message):
        defaults(tiny_store)
