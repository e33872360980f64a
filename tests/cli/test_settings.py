"""Settings: flag over environment over default; a bad one is one clear line; the document is
the class.
"""

import os
import time
from pathlib import Path

import httpx
import pytest

from cloze.export.publish import export
from cloze.model_store import Store
from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.machine import available_cpus
from cloze.service.settings import load_settings, unknown_variables
from tests.support.serving import failed_start, running_server

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


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("CLOZE_PORT", "70000", r"^CLOZE_PORT: .*less than or equal to 65535, got '70000'$"),
        ("CLOZE_PORT", "tcp://10.0.0.1:8000", r"^CLOZE_PORT: .*'tcp://10.0.0.1:8000'$"),
        ("CLOZE_DEVICE", "tpu", r"^CLOZE_DEVICE: .*'auto', 'cpu' or 'cuda', got 'tpu'$"),
        ("CLOZE_LOG_LEVEL", "loud", r"^CLOZE_LOG_LEVEL: .*got 'loud'$"),
    ],
)
def test_a_bad_value_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError, match=message):
        load_settings()


def test_a_bad_flag_is_named_as_a_flag() -> None:
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


# ---- the default model of a task -----------------------------------------------------------------


def test_the_default_of_a_task_is_stated(tiny_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOZE_DEFAULT_FILL_MASK", "distilbert")
    monkeypatch.setenv("CLOZE_DEFAULT", "embed=distilbert@1, nsp=bert")
    assert unknown_variables() == []
    assert load_settings().default_models() == {
        "fill-mask": "distilbert",
        "embed": "distilbert@1",
        "nsp": "bert",
    }
    with running_server(tiny_store, "--default", "fill-mask=distilbert") as server:
        answer = httpx.post(f"{server.url}/fill-mask", json={"inputs": "a [MASK]"})
        assert answer.headers["x-model"] == "distilbert@1"
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "a"})
        assert answer.headers["x-model"] == "bert@1"


def test_without_a_statement_the_oldest_name_answers(
    tiny_store: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    for kind, name in (("distilbert", "zebra"), ("bert", "aardvark"), ("distilbert", "zebra")):
        export(str(checkpoints[kind]), name, Store(store))
        time.sleep(1)  # manifests have whole seconds
    with running_server(store) as server:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "a"})
        assert answer.headers["x-model"] == "zebra@2"
    with running_server(store, "--model", "aardvark", "--model", "zebra") as server:
        answer = httpx.post(f"{server.url}/embed", json={"inputs": "a"})
        assert answer.headers["x-model"] == "aardvark@1"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CLOZE_DEFAULT": "embed"}, "CLOZE_DEFAULT: 'embed' is not TASK=NAME"),
        (
            {"CLOZE_DEFAULT": "embed=bert", "CLOZE_DEFAULT_EMBED": "distilbert"},
            "CLOZE_DEFAULT: the task 'embed' has two defaults",
        ),
        ({"CLOZE_DEFAULT_EMBED": "x"}, "default of embed: no model 'x' is served (there: bert,"),
        (
            {"CLOZE_DEFAULT_NSP": "distilbert"},
            "default of nsp: model distilbert cannot do nsp; it does fill-mask",
        ),
    ],
)
def test_a_wrong_default_stops_the_start(
    tiny_store: Path, variables: dict[str, str], message: str
) -> None:
    log = failed_start("--model-store", str(tiny_store), env=os.environ | variables)
    assert log.splitlines()[-1].startswith(f"cloze: {message}")
