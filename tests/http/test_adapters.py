"""Adapters of PEFT on one base: results in mixed batches, refusals, reloads, memory, keys."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import BertForPreTraining

from cloze.export.errors import ExportError
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Bundle, Store
from cloze.model_store.batch import Encoding
from cloze.model_store.heads import embedding, sequence_classification, token_classification
from cloze.model_store.heads.head import HeadRequest
from cloze.model_store.manifest import Precision
from cloze.model_store.peft import AdapterError
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine, SessionOptions
from cloze.service.errors import StartupError
from cloze.service.models import served_models
from cloze.service.models.adapters import AdapterBundle, open_adapters
from cloze.service.models.served_models import LocalModels, check_memory, close_models
from cloze.service.service import MOST_ADAPTER_SERIES
from cloze.service.settings import Settings, load_settings
from tests.support.adapter_folders import LABELS, Recipe, classifier, write
from tests.support.adapter_folders import embedding as torch_embedding
from tests.support.adapter_folders import logits as torch_logits
from tests.support.command import cloze
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server
from tests.support.waiting import wait_until

LARGE = [f"large-{number}" for number in range(4)]
"""Adapters of which only one has room."""

ODD = ("base", "two words", "ünï", "two\nlines", ".hidden", "x" * 65)
TEXT = "the film was good"
EVERY_LAYER = ("query", "key", "value", "dense")
LAYERS = ("query", "key", "output.dense", "intermediate.dense")
RSLORA = {"use_rslora": True}
RECIPES = {
    "stars": classifier(1),
    "topics": classifier(2, targets=LAYERS, rank=2, ranks={"key": 3}, config=RSLORA),
    "heads-only": classifier(3, targets=()),
    "names": Recipe(4, task="TOKEN_CLS", head={"classifier": (3, 64)}, targets=EVERY_LAYER[:3]),
    "vectors": Recipe(5, rank=6),
}


@pytest.fixture(scope="module")
def base_model(checkpoints: dict[str, Path]) -> BertForPreTraining:
    return BertForPreTraining.from_pretrained(checkpoints["bert"]).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Bundle:
    root = tmp_path_factory.mktemp("adapters-store")
    options = ExportOptions(adapters=("all-linear",), precisions=(Precision.INT8,))
    return export(str(checkpoints["bert"]), "base", Store(root), options)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, base_model: BertForPreTraining
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write(root / name, recipe, base_model) for name, recipe in RECIPES.items()}


def opened(
    base: Bundle, folders: dict[str, Path], precision: Precision = Precision.FP32
) -> tuple[OnnxEngine, dict[str, AdapterBundle]]:
    """Return an engine with adapters, which it holds, and the adapters by name."""
    options = SessionOptions(adapter_bytes=64 * 2**20, alone_threads=2)
    engine = OnnxEngine(base, Device.CPU, precision, options=options)
    adapters = {a.manifest.name: a for a in open_adapters([*folders.values()], [base], 64).bundles}
    for adapter in adapters.values():
        engine.adapters.add(adapter.key, adapter.read)
        engine.adapters.hold(adapter.key).result(60)
    return engine, adapters


def asking(seed: int, kind: str, key: str = "") -> Encoding:
    """Return a random sequence that asks for the results of a kind of adapter."""
    ids = np.random.default_rng(seed).integers(5, 60, 12).astype(np.int32)
    heads = {"class": sequence_classification, "tokens": token_classification, "embed": embedding}
    return Encoding(ids, np.zeros(12, np.int32), {heads[kind].HEAD.name: HeadRequest()}, key)


KINDS = {"stars": "class", "topics": "class", "heads-only": "class", "names": "tokens"}
KINDS |= {"vectors": "embed", "": "embed"}


def expected(name: str, folder: Path | None, base: BertForPreTraining, ids: Any) -> np.ndarray:
    if KINDS[name] == "embed":
        return torch_embedding(folder, base, ids)
    return torch_logits(folder, base, ids, tokens=KINDS[name] == "tokens")


def array(output: Any) -> np.ndarray:
    (result,) = output.values()
    return result.array


def test_each_adapter_has_its_results_alone_and_beside_any_other(
    base: Bundle, folders: dict[str, Path], base_model: BertForPreTraining
) -> None:
    engine, adapters = opened(base, folders)
    keys = {name: adapter.key for name, adapter in adapters.items()} | {"": ""}
    batch = [asking(seed, KINDS[name], keys[name]) for seed, name in enumerate(KINDS)]
    wanted = [
        expected(name, folders.get(name), base_model, encoding.input_ids)
        for name, encoding in zip(KINDS, batch, strict=True)
    ]
    alone = [array(engine.run([encoding], alone=True)[0]) for encoding in batch]
    for first in range(len(batch)):
        turned = [*batch[first:], *batch[:first]]
        outputs = [array(output) for output in engine.run(turned)]
        for number, output in enumerate(outputs):
            place = (first + number) % len(batch)
            np.testing.assert_allclose(output, wanted[place], rtol=0, atol=1e-5)
            np.testing.assert_allclose(output, alone[place], rtol=0, atol=2e-6)
    same = engine.run([replace(batch[1], input_ids=batch[n].input_ids) for n in (1, 2)])
    np.testing.assert_allclose(array(same[0]), wanted[1], rtol=0, atol=1e-5)
    own = expected("topics", folders["topics"], base_model, batch[2].input_ids)
    np.testing.assert_allclose(array(same[1]), own, rtol=0, atol=1e-5)
    assert not np.allclose(wanted[4], wanted[5], atol=1e-3)  # the adapter changes something


def test_int8_keeps_the_integers_of_the_base(
    base: Bundle, folders: dict[str, Path], base_model: BertForPreTraining
) -> None:
    engine, adapters = opened(base, folders, Precision.INT8)
    encodings = [asking(1, "embed", key) for key in ("", adapters["vectors"].key)]
    neighbours = [asking(seed, "class", adapters["stars"].key) for seed in (2, 3)]
    without, single = (array(engine.run([encoding])[0]) for encoding in encodings)
    beside = [array(output) for output in engine.run([*encodings, *neighbours])[:2]]
    np.testing.assert_allclose(beside, [without, single], rtol=0, atol=2e-6)
    plain = OnnxEngine(base, Device.CPU, Precision.INT8).run([asking(1, "embed")])[0]
    np.testing.assert_allclose(without, array(plain), rtol=0, atol=2e-6)
    ids = encodings[0].input_ids
    before, after = (torch_embedding(f, base_model, ids) for f in (None, folders["vectors"]))
    assert np.corrcoef(single - without, after - before)[0, 1] > 0.95


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def setting(**values: Any) -> Change:
    return lambda config, _: config.update(values)


def tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def apply(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        full_name = f"base_model.model.{name}"
        tensors[full_name] = change(tensors.get(full_name, np.zeros((4, 64), np.float32)))

    return apply


QUERY = "bert.encoder.layer.0.attention.self.query"
A, B = f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"


def twice(_: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    for name in (A, B):
        short = f"base_model.model.{name.removeprefix('bert.')}"
        tensors[short] = tensors[f"base_model.model.{name}"]


BAD: dict[str, tuple[Change, str]] = {
    "rank": (setting(r=9), "A [4, 64] and B [64, 4]; its rank is 9"),
    "task": (setting(task_type="CAUSAL_LM"), "belongs nowhere: task_type is 'CAUSAL_LM'"),
    "infinite": (setting(lora_alpha=1e300), "times 2.5e+299, alpha by rank, is not finite"),
    "twice": (twice, "under two names, with a prefix and without"),
    "width": (tensor(A, lambda a: a[:, :32]), "has 32 inputs"),
    "outputs": (tensor(B, lambda b: b[:32]), "has 32 outputs"),
    "layer": (tensor("bert.encoder.layer.7.x.lora_A.weight", lambda a: a), "has lora_A only"),
    "stray": (tensor("qa_outputs.weight", lambda a: a), "'qa_outputs.weight' belongs nowhere"),
    "nan": (tensor("classifier.bias", lambda a: a * np.nan), "a number that is not finite"),
    "head": (tensor("classifier.weight", lambda a: a[:, :32]), "its base has 64 numbers"),
    "labels": (tensor("classifier.weight", lambda a: a[:2]), "classifier.bias is [3]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_adapter_is_refused_by_name(
    name: str, base: Bundle, folders: dict[str, Path], tmp_path: Path
) -> None:
    change, message = BAD[name]
    folder = Path(shutil.copytree(folders["stars"], tmp_path / name))
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    change(config, tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    written = {n: np.ascontiguousarray(t) for n, t in tensors.items()}
    save_file(written, folder / "adapter_model.safetensors")
    with pytest.raises(StartupError) as raised:
        open_adapters([folder], [base], 64)
    assert message in str(raised.value)
    assert str(folder) in str(raised.value)


def test_files_that_are_no_adapters_are_refused(
    base: Bundle, folders: dict[str, Path], tmp_path: Path, tiny_store: Path
) -> None:
    pickled, cut, other, same = (
        Path(shutil.copytree(folders["stars"], tmp_path / name))
        for name in ("pickled", "cut", "other", "base")
    )
    name = "adapter_model.safetensors"
    (pickled / name).rename(pickled / "adapter_model.bin")
    (cut / name).write_bytes((cut / name).read_bytes()[:-8])
    save_file(load_file(other / name), other / name, {"cloze_encoder_sha256": "0" * 64})
    plain, no_base = Store(tiny_store).open("bert"), r"no served bundle takes adapters \(bert"
    for folder, bundle, problem in (
        (pickled, base, r"adapter_model.bin is never loaded, since it can run code"),
        (cut, base, r"adapter_model\.safetensors: "),
        (other, base, "was trained on another encoder"),
        (same, base, "has the name of the bundle base@1"),
        (folders["stars"], plain, no_base),
    ):
        with pytest.raises(StartupError, match=problem):
            open_adapters([folder], [bundle], 64)


def test_a_base_takes_adapters_only_on_the_layers_that_it_was_exported_for(
    checkpoints: dict[str, Path], folders: dict[str, Path], tmp_path: Path
) -> None:
    store = Store(tmp_path)
    narrow = export(str(checkpoints["bert"]), "narrow", store, ExportOptions(adapters=("value",)))
    with pytest.raises(StartupError, match="adapters of this base change the layers value"):
        open_adapters([folders["stars"]], [narrow], 64)
    with pytest.raises(ExportError, match=r"--adapters q: no linear layer .* \(there: dense, key"):
        export(str(checkpoints["bert"]), "wrong", store, ExportOptions(adapters=("q",)))


def test_a_server_answers_by_adapters_in_every_protocol_and_reloads_them(
    base: Bundle, folders: dict[str, Path], tmp_path: Path
) -> None:
    served = tmp_path / "served"
    for name in ("stars", "vectors"):
        shutil.copytree(folders[name], served / name)
    for number in range(MOST_ADAPTER_SERIES):  # more than have metrics of their own
        shutil.copytree(folders["heads-only"], served / f"tenant-{number}")
    flags = ("--adapter", str(served), "--precision", "fp32")
    with running_server(base.path.parents[1], *flags) as server:
        named = next(line for line in server.log if "serving stars@1, tenant-0@1, " in line)
        assert re.search(r" and \d+ more on base@1$", named)
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert models[0]["id"] == "base@1"
        assert len(models) == 2 * (3 + MOST_ADAPTER_SERIES)
        before = scores(server, "stars")
        assert before.keys() == set(LABELS)
        metrics = httpx.get(f"{server.url}/metrics").text
        shown = set(re.findall(r'cloze_requests_total\{[^}]*model="([^"]*)"', metrics))
        assert len(shown - {"base", ""}) == MOST_ADAPTER_SERIES
        assert "vectors" not in shown  # counts as its base
        info = {m["name"]: m for m in httpx.get(f"{server.url}/info").json()["models"]}
        assert info["stars"]["base"] == "base@1"
        assert info["base"]["embedding_space"] != info["vectors"]["embedding_space"]
        shutil.copytree(folders["topics"], served / "topics")
        assert "reloaded: added topics@1" in server.reload()
        assert classify(server, "topics").status_code == 200
        shutil.rmtree(served / "topics")
        assert "reloaded: removed topics@1" in server.reload()
        assert scores(server, "stars") == before


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_results_are_those_of_peft(
    base: Bundle, base_model: BertForPreTraining, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    import peft
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    own = BertForSequenceClassification.from_pretrained(checkpoints["bert"], num_labels=3)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, target_modules="all-linear", use_rslora=True,
        alpha_pattern={"query": 3}, init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(own, config).eval()
    model.save_pretrained(tmp_path / "by-peft")
    engine, adapters = opened(base, {"by-peft": tmp_path / "by-peft"})
    encoding = asking(1, "class", adapters["by-peft"].key)
    with torch.no_grad():
        wanted = model(torch.from_numpy(encoding.input_ids.astype(np.int64))[None]).logits[0]
    batch = [encoding, asking(2, "embed")]
    np.testing.assert_allclose(array(engine.run(batch)[0]), wanted.numpy(), rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, base_model: BertForPreTraining) -> Path:
    """Return a folder of good adapters and of bad ones."""
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate(("stars", "topics", "gone")):
        write(folder / name, classifier(seed), base_model)
    for seed, name in enumerate(LARGE):
        write(folder / name, Recipe(seed, rank=300, targets=("query", "key", "value")), base_model)
    for name in ODD:
        shutil.copytree(folder / "stars", folder / name)
    broken = Path(shutil.copytree(folder / "stars", folder / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"x" * 64)
    return folder


@pytest.fixture(scope="module")
def server(base: Bundle, served: Path) -> Iterator[Server]:
    flags = ("--adapter", str(served), "--precision", "fp32", "--workers", "2")
    # On a busy machine, 429 is no failure.
    variables = {"CLOZE_ADAPTER_MEMORY_MB": "1", "CLOZE_MAX_QUEUE_WAIT_MS": "60000"}
    with running_server(base.path.parents[1], *flags, **variables) as running:
        yield running


def classify(server: Server, name: str, path: str = "classify") -> httpx.Response:
    body = {"inputs": TEXT, "model": name}
    return httpx.post(f"{server.url}/{path}", json=body, timeout=90)


def scores(server: Server, name: str) -> dict[str, float]:
    response = classify(server, name)
    assert response.status_code == 200, response.text
    return {row["label"]: row["score"] for row in response.json()[0]}


def test_bad_adapters_of_a_folder_do_not_touch_the_others(server: Server, served: Path) -> None:
    ids = {row["id"] for row in httpx.get(f"{server.url}/v1/models").json()["data"]}
    names = {"base", "stars", "topics", "gone", *LARGE}
    assert ids == names | {f"{name}@1" for name in names}
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
        assert classify(server, name, "embed").status_code == 200
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
    server: Server, served: Path, base_model: BertForPreTraining, tmp_path: Path
) -> None:
    old = scores(server, "stars")
    ended = threading.Event()
    answers: list[dict[str, float]] = []

    def ask() -> None:
        while not ended.is_set():
            answers.append(scores(server, "stars"))

    with ThreadPoolExecutor(3) as clients:
        asking = [clients.submit(ask) for _ in range(3)]
        try:
            wait_until(lambda: len(answers) > 0)
            for rank in (9, 2, 17):
                new = write(tmp_path / str(rank), classifier(rank, rank=rank), base_model)
                (served / "stars").rename(tmp_path / f"before-{rank}")
                new.rename(served / "stars")
                assert "reloaded: added stars@1; removed stars@1;" in server.reload()
                assert scores(server, "stars") != old  # in memory before the next one comes
        finally:
            ended.set()
        for client in asking:
            client.result()
    assert scores(server, "stars") != old
    kinds = {json.dumps(answer) for answer in answers}
    assert json.dumps(old) in kinds
    assert len(kinds) <= 4, "an answer mixed two adapters"


def test_what_is_served_is_read_again_only_if_its_files_changed(
    base: Bundle, served: Path, tmp_path: Path
) -> None:
    for name in ("stars", "topics"):
        shutil.copytree(served / name, tmp_path / name)
    stars, topics = open_adapters([tmp_path], [base], 64).bundles
    link = tmp_path / "current"
    link.symlink_to(served / "topics")
    assert [each.manifest.name for each in open_adapters([link], [base], 64).bundles] == ["current"]
    link.unlink()
    weights = tmp_path / "topics" / "adapter_model.safetensors"
    shutil.copyfile(served / "gone" / weights.name, weights)  # of the same size
    again, changed = open_adapters([tmp_path], [base], 64, running=[base, stars, topics]).bundles
    assert again is stars
    assert changed.key != topics.key
    stars.read()
    with pytest.raises(AdapterError, match="it was changed since the last reload"):
        topics.read()  # its key and its space are those of the old files


def test_adapters_count_in_the_memory_of_the_start_and_have_a_limit(
    base: Bundle, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match=r"it needs .* MiB; CLOZE_ADAPTER_MEMORY_MB is 0$"):
        open_adapters([served / LARGE[0]], [base], 0)
    adapters = open_adapters([served / name for name in LARGE], [base], 64).bundles
    weights = sum(file.stat().st_size for file in base.path.glob("weights.bin"))
    monkeypatch.setattr(served_models, "memory_limit", lambda: 71_000_000 + weights)
    settings = Settings(device=Device.CPU, precision=Precision.FP32, adapter=(str(served),))
    check_memory([base], settings)
    for memory_mb, shown in ((1024, "4 MB"), (2, "2 MB")):
        limited = settings.model_copy(update={"adapter_memory_mb": memory_mb})
        with pytest.raises(StartupError, match=f"the adapters of base@1 {shown}"):
            check_memory([base, *adapters], limited)


def test_a_kept_adapter_is_read_from_where_it_is_now(
    base: Bundle, served: Path, tmp_path: Path
) -> None:
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
    engine.hold(moved.key).result(20)
    assert engine.keys == [moved.key]
    close_models(models)


KEYS = {"everyone": (), "tenant": ("topics", "vectors@1"), "tagger": ("names",)}
KEYS |= {"early": ("not-yet-served",)}
Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(
    tmp_path_factory: pytest.TempPathFactory, base: Bundle, folders: dict[str, Path]
) -> Iterator[Ask]:
    """Return a function that sends a request with the key of a name."""
    file, keys = tmp_path_factory.mktemp("keys") / "keys.toml", {}
    for name, models in KEYS.items():
        limits = [part for model in models for part in ("--model", model)]
        keys[name] = cloze("keys", "add", name, "--file", str(file), *limits).stdout.strip()
    served = [str(folder) for name, folder in folders.items() if name != "heads-only"]
    flags = [part for folder in served for part in ("--adapter", folder)]
    flags += ["--keys-file", str(file), "--precision", "fp32"]
    with (
        running_server(base.path.parents[1], *flags) as server,
        httpx.Client(base_url=server.url) as client,
    ):

        def send(name: str, path: str, body: Any = None) -> httpx.Response:
            headers = {"authorization": f"Bearer {keys[name]}"}
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
        infer = f"/v2/models/{name}.text-classification/infer"
        assert ask("tenant", infer, {"inputs": [tensor]}).status_code == status
        for path in ("/classify", "/predict", "/tokenize"):
            assert ask("tenant", path, texts | {"model": name}).status_code == status
    for model, status in (("vectors", 200), ("base", 404)):
        body = {"input": TEXT, "model": model}
        assert ask("tenant", "/v1/embeddings", body).status_code == status
    assert error_of(ask("tagger", "/classify", texts)) == (424, "task_not_supported")
    for path, body in (("/v1/models", None), ("/info", None), ("/embed", {"inputs": TEXT})):
        assert error_of(ask("early", path, body)) == (403, "forbidden")
