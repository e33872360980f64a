"""Adapters that break, change, go or crowd each other while a server answers by them."""

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from transformers import BertForPreTraining

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from cloze.model_store.manifest import Precision
from cloze.model_store.peft import AdapterError
from cloze.service.core import Device
from cloze.service.engine.adapters import LoadedAdapters
from cloze.service.errors import StartupError
from cloze.service.models import served_models
from cloze.service.models.adapters import open_adapters
from cloze.service.models.served_models import LocalModels, check_memory, close_models
from cloze.service.settings import Settings, load_settings
from tests.support.adapter_folders import Recipe, classifier, write
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server

LARGE = [f"large-{number}" for number in range(4)]
"""Adapters of which only one has room."""

ODD = ("base", "two words", "ünï", "two\nlines", ".hidden", "x" * 65)
TEXT = "the film was good"


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> BertForPreTraining:
    return BertForPreTraining.from_pretrained(checkpoints["bert"]).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Bundle:
    options = ExportOptions(adapters=("query", "key", "value"))
    store = Store(tmp_path_factory.mktemp("store"))
    return export(str(checkpoints["bert"]), "base", store, options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model: BertForPreTraining) -> Path:
    """Return a folder of good adapters and of bad ones."""
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("stars", "topics", "gone")):
        write(folder / name, classifier(seed), model)
    for seed, name in enumerate(LARGE):
        write(folder / name, Recipe(seed, rank=300, targets=("query", "key", "value")), model)
    for name in ODD:
        shutil.copytree(folder / "stars", folder / name)
    broken = Path(shutil.copytree(folder / "stars", folder / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"x" * 64)
    return folder


@pytest.fixture(scope="module")
def server(base: Bundle, served: Path) -> Iterator[Server]:
    flags = ("--adapter", str(served), "--precision", "fp32", "--workers", "2")
    variables = {
        "CLOZE_ADAPTER_MEMORY_MB": "1",
        "CLOZE_MAX_QUEUE_WAIT_MS": "60000",  # on a busy machine, 429 is no failure
    }
    with running_server(base.path.parents[1], *flags, **variables) as server:
        yield server


def classify(server: Server, name: str) -> httpx.Response:
    body = {"inputs": TEXT, "model": name}
    return httpx.post(f"{server.url}/classify", json=body, timeout=90)


def scores(server: Server, name: str) -> dict[str, float]:
    response = classify(server, name)
    assert response.status_code == 200, response.text
    return {row["label"]: row["score"] for row in response.json()[0]}


def test_bad_adapters_of_a_folder_do_not_touch_the_others(server: Server, served: Path) -> None:
    names = {row["id"] for row in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert names == {"base@1", "stars@1", "topics@1", "gone@1", *(f"{n}@1" for n in LARGE)}
    log = "".join(server.log)
    assert f"an adapter is left out: adapter {served}/broken: adapter_model.safetensors" in log
    assert "two\\nlines: its folder must have a name of 1 to 64 letters" in log
    assert f"the adapter {served}/base has the name of the bundle base@1" in log
    refused = server.reload().partition("; refused ")[2]
    assert refused.count(f"{served}/") == 1 + len(ODD)
    assert f"{served}/broken" in refused


def test_an_adapter_without_files_fails_alone_and_the_log_says_why(
    server: Server, served: Path
) -> None:
    before = scores(server, "gone")
    hidden = served.parent / "hidden"
    (served / "gone").rename(hidden)
    assert scores(server, "gone") == before  # it is loaded
    for name in LARGE[:2]:  # makes room
        body = {"inputs": TEXT, "model": name}
        assert httpx.post(f"{server.url}/embed", json=body, timeout=90).status_code == 200
    with ThreadPoolExecutor(8) as clients:
        gone = [clients.submit(classify, server, "gone") for _ in range(8)]
        others = [clients.submit(scores, server, "stars") for _ in range(8)]
        answers = [future.result() for future in gone]
        assert {error_of(answer) for answer in answers} == {(503, "adapter_unavailable")}
        assert answers[0].headers["retry-after"] == "1"
        assert len({json.dumps(future.result()) for future in others}) == 1
    assert "ERROR the adapter gone: adapter_model.safetensors cannot be read" in "".join(server.log)
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    assert "reloaded: removed gone@1;" in server.reload()
    assert classify(server, "gone").status_code == 404
    hidden.rename(served / "gone")
    assert "reloaded: added gone@1;" in server.reload()
    assert scores(server, "gone") == before


def test_an_adapter_that_becomes_bad_is_served_as_it_was(server: Server, served: Path) -> None:
    before = scores(server, "topics")
    file = served / "topics" / "adapter_model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-4])
    kept, _, refused = server.reload().partition("; refused ")
    assert "topics@1" in kept.partition("kept ")[2]
    assert f"{served}/topics" in refused
    assert scores(server, "topics") == before
    file.write_bytes(data)
    assert f"{served}/topics" not in server.reload()


def test_an_adapter_is_replaced_by_one_of_another_rank_under_load(
    server: Server, served: Path, model: BertForPreTraining, tmp_path: Path
) -> None:
    old = scores(server, "stars")
    ended = threading.Event()

    def ask() -> list[dict[str, float]]:
        answers = []
        while not ended.is_set():
            answers.append(scores(server, "stars"))
        return answers

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask) for _ in range(3)]
        try:
            for rank in (9, 2, 17):
                new = write(tmp_path / str(rank), classifier(rank, rank=rank), model)
                (served / "stars").rename(tmp_path / f"before-{rank}")
                new.rename(served / "stars")
                assert "reloaded: added stars@1; removed stars@1;" in server.reload()
                assert scores(server, "stars") != old  # in memory before the next one comes
        finally:
            ended.set()
        answers = [answer for client in asking for answer in client.result()]
    new_scores = scores(server, "stars")
    assert new_scores != old
    kinds = {json.dumps(answer) for answer in answers}
    assert json.dumps(old) in kinds
    assert len(kinds) <= 4, "an answer mixed two adapters"


# ---- without a server ----------------------------------------------------------------------------


def test_an_adapter_has_the_name_of_its_link(base: Bundle, served: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(served / "topics")
    opened = open_adapters([tmp_path / "current"], [base], 64)
    assert [adapter.manifest.name for adapter in opened.bundles] == ["current"]


def test_a_folder_without_a_good_adapter_is_refused(
    base: Bundle, served: Path, tmp_path: Path
) -> None:
    for name in ("broken", "two words"):
        shutil.copytree(served / name, tmp_path / name)
    with pytest.raises(StartupError, match=r"broken: adapter_model\.safetensors"):
        open_adapters([tmp_path], [base], 64)
    shutil.copytree(served / "topics", tmp_path / "good")
    opened = open_adapters([tmp_path], [base], 64)
    assert [adapter.manifest.name for adapter in opened.bundles] == ["good"]
    assert len(opened.refused) == 2
    with pytest.raises(StartupError, match=r"broken: adapter_model\.safetensors"):
        open_adapters([tmp_path, tmp_path / "broken"], [base], 64)  # it is named by itself


def test_adapters_count_in_the_memory_of_the_start(
    base: Bundle, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = open_adapters([served / name for name in LARGE], [base], 64).bundles
    assert sum(adapter.size for adapter in adapters) > 3 * 2**20
    weights = sum(f.stat().st_size for f in base.path.glob("weights.bin"))
    limit = 70_000_000 + weights + 1_000_000
    monkeypatch.setattr(served_models, "memory_limit", lambda: limit)
    settings = Settings(device=Device.CPU, precision=Precision.FP32, adapter=(str(served),))
    check_memory([base], settings)
    with pytest.raises(StartupError, match=r"the adapters of base@1 4 MB.*CLOZE_ADAPTER_MEMORY_MB"):
        check_memory([base, *adapters], settings)
    bounded = settings.model_copy(update={"adapter_memory_mb": 2})
    with pytest.raises(StartupError, match="the adapters of base@1 2 MB"):
        check_memory([base, *adapters], bounded)


def test_what_is_served_is_read_again_only_if_its_files_changed(
    base: Bundle, served: Path, tmp_path: Path
) -> None:
    for name in ("stars", "topics"):
        shutil.copytree(served / name, tmp_path / name)
    stars, topics = open_adapters([tmp_path], [base], 64).bundles
    weights = tmp_path / "topics" / "adapter_model.safetensors"
    shutil.copyfile(served / "gone" / weights.name, weights)  # of the same size
    again, changed = open_adapters([tmp_path], [base], 64, running=[base, stars, topics]).bundles
    assert again is stars
    assert changed.key != topics.key
    stars.read()
    with pytest.raises(AdapterError, match="it was changed since the last reload"):
        topics.read()  # its key and its space are those of the old files
    shutil.copytree(served / "stars", tmp_path / "other" / "stars")
    [other] = open_adapters([tmp_path / "other"], [base], 64).bundles
    with pytest.raises(StartupError, match="has the name of the adapter"):
        open_adapters([tmp_path, tmp_path / "other"], [base], 64, running=[base, stars, other])


def test_a_kept_adapter_is_read_from_where_it_is_now(
    base: Bundle, served: Path, tmp_path: Path
) -> None:
    """A reload keeps the model of an adapter that was moved; its next reading is of the new place."""
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(served / "stars", old / "stars")
    settings = {"model_store": base.path.parents[1], "adapter": (str(old),), "precision": "fp32"}
    opener = LocalModels(load_settings(settings))
    running = opener.open([base, *open_adapters([old], [base], 64).bundles])
    old.rename(new)
    [moved] = open_adapters([new], [base], 64).bundles
    models = opener.open([base, moved], running)
    assert models == running
    engine = models[0].adapters
    assert isinstance(engine, LoadedAdapters)
    engine.hold(moved.key).result(20)
    assert engine.keys == [moved.key]
    close_models(models)
