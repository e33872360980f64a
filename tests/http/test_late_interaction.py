"""Late interaction and BGE-M3: the vectors of their own libraries, and what the server makes of them.

The oracle is sentence-transformers' ``MultiVectorEncoder``, which reads the directories of PyLate and
of Stanford's ColBERT. For BGE-M3, it is a direct computation over transformers' encoder.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from tokenizers import Tokenizer
from transformers import AutoModel

from cloze.export.errors import ExportError
from cloze.export.graph.session import open_session
from cloze.export.load.checkpoint import Checkpoint, load_checkpoint
from cloze.export.measure.scorer import GraphScorer
from cloze.export.publish import export
from cloze.model_store import Store
from cloze.model_store.batch import Encoding
from cloze.model_store.embedding_space import embedding_space, own_recipes
from cloze.model_store.heads.multi_vector import MultiVectorRequest
from cloze.model_store.layouts import Layout
from cloze.model_store.manifest import Manifest
from tests.support import late_models
from tests.support.refusals import error_of
from tests.support.serving import Server, running_server

QUERIES = ["the king", "paris is the capital of france", "who walked " * 9]
DOCUMENTS = [
    "the king was dead.",
    "paris, the capital city, had great doors.",
    "time year people water " * 9,
    "red, green. blue",
]
KINDS: dict[str, Any] = {
    "pylate": (late_models.pylate, {}),
    "attending": (late_models.pylate, {"attend_to_expansion_tokens": True}),
    "unfilled": (late_models.pylate, {"do_query_expansion": False, "query_prefix": ""}),
    "stanford": (late_models.stanford, {}),
    "modernbert": (late_models.pylate_modernbert, {}),
}
Floats = NDArray[np.float32]
HEADER, EXPECTED = "x-embedding-space", "x-expect-embedding-space"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("late")
    made = {name: make(root / name, **settings) for name, (make, settings) in KINDS.items()}
    return made | {"bge": late_models.bge_m3(root / "bge")}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Store:
    store = Store(tmp_path_factory.mktemp("store"))
    for name, folder in folders.items():
        export(str(folder), name, store)
    return store


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[Server]:
    with running_server(store.root, "--frontends", "1") as server:
        yield server


def answer(server: Server, route: str, **body: Any) -> httpx.Response:
    response = httpx.post(f"{server.url}{route}", json=body)
    assert response.status_code == 200, response.text
    return response


def vectors(server: Server, model: str, texts: list[str], role: str) -> list[Floats]:
    response = answer(server, "/embed_all", inputs=texts, model=model, prompt_name=role)
    return [np.array(rows, np.float32) for rows in response.json()]


def ranks(server: Server, model: str, query: str) -> Any:
    response = answer(server, "/rerank", query=query, texts=DOCUMENTS, model=model)
    assert response.headers["x-ranked-by"] == "late-interaction"
    return response.json()


def max_sim(query: Floats, document: Floats) -> float:
    return float((query @ document.T).max(1).sum())


@pytest.mark.parametrize("model", ["pylate", "attending", "unfilled", "stanford", "modernbert"])
def test_vectors_and_ranks_are_those_of_sentence_transformers(
    server: Server, folders: dict[str, Path], model: str
) -> None:
    oracle = MultiVectorEncoder(str(folders[model]), device="cpu")
    theirs = oracle.encode_query(QUERIES), oracle.encode_document(DOCUMENTS)
    ours = vectors(server, model, QUERIES, "query"), vectors(server, model, DOCUMENTS, "document")
    for one, other in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True):
        np.testing.assert_allclose(one, np.asarray(other), atol=2e-5)
    for number, query in enumerate(QUERIES):
        expected = np.asarray(oracle.similarity(theirs[0][number : number + 1], theirs[1]))[0]
        rows = ranks(server, model, query)
        assert [row["index"] for row in rows] == np.argsort(-expected).tolist()
        scores = [row["score"] for row in rows]
        assert scores == pytest.approx(sorted(expected.tolist(), reverse=True), abs=1e-4)


def test_queries_of_one_batch_attend_to_their_own_tokens(store: Store) -> None:
    bundle = store.open("pylate")
    manifest, file = bundle.manifest, bundle.file(bundle.manifest.graph.file)
    session = open_session(file, Layout.DENSE)
    scorer = GraphScorer(session, manifest.graph_spec(manifest.graph.layout))
    ids = np.random.default_rng(1).integers(5, 180, (4, 12), dtype=np.int32)

    def run(*chosen: tuple[int, int]) -> list[Floats]:
        batch = [
            Encoding(ids[row], np.zeros(12, np.int32), {"multi_vector": MultiVectorRequest(keys)})
            for row, keys in chosen
        ]
        return [output["multi_vector"].array for output in scorer.run(batch)]

    queries = [(0, 3), (1, 0), (2, 12), (3, 7)]
    for rows, chosen in zip(run(*queries), queries, strict=True):
        np.testing.assert_allclose(rows, run(chosen)[0], atol=1e-6)
    assert np.abs(run((0, 3))[0] - run((0, 4))[0]).max() > 0.01


def _settings(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config_sentence_transformers.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def _tensors(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / name
        pickled = file.suffix == ".pt"
        tensors = torch.load(file, weights_only=True) if pickled else load_file(file)
        tensors[min(tensors)] += 0.01
        torch.save(tensors, file) if pickled else save_file(tensors, file, {"format": "pt"})

    return edit


MOVES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "encoder": ("pylate", "embed-all", _tensors("model.safetensors")),
    "layer": ("pylate", "embed-all", _tensors("1_Dense/model.safetensors")),
    "query marker": ("pylate", "embed-all", _settings(query_prefix="[D] ")),
    "document length": ("pylate", "embed-all", _settings(document_length=19)),
    "filling": ("pylate", "embed-all", _settings(do_query_expansion=False)),
    "attention": ("pylate", "embed-all", _settings(attend_to_expansion_tokens=True)),
    "skipped words": ("pylate", "embed-all", _settings(skiplist_words=[","])),
    "layer in the encoder's file": ("stanford", "embed-all", _tensors("model.safetensors")),
    "layer of its own": ("bge", "embed-all", _tensors("colbert_linear.pt")),
    "layer of weights": ("bge", "embed-sparse", _tensors("sparse_linear.pt")),
}


def space(described: Manifest, task: str, checkpoint: Checkpoint | None = None) -> str | None:
    """Return the space of a bundle, or of what an export of a checkpoint in its place would be."""
    if checkpoint is not None:
        changes = {"source": checkpoint.source, "heads": dict(checkpoint.options)}
        described = described.model_copy(update=changes)
    return embedding_space(described, "fp32", own_recipes(described)[task])


@pytest.mark.parametrize("change", MOVES)
def test_what_moves_their_vectors_changes_the_name_of_their_space(
    store: Store, folders: dict[str, Path], tmp_path: Path, change: str
) -> None:
    model, task, edit = MOVES[change]
    described, own = store.manifest(model), space(store.manifest(model), task)
    assert own is not None
    copied = shutil.copytree(folders[model], tmp_path / "under another name")
    (copied / "README.md").write_text("another card")
    assert space(described, task, load_checkpoint(str(copied))) == own, "the same checkpoint"
    edit(copied)
    changed = load_checkpoint(str(copied))
    assert space(described, task, changed) != own
    if model == "bge":
        others = own_recipes(described).keys() - {task}
        assert all(space(described, t) == space(described, t, changed) for t in others)


@pytest.mark.parametrize(
    ("route", "model", "roles"),
    [("/embed_all", "pylate", 2), ("/embed_all", "bge", 1), ("/embed_sparse", "bge", 1)],
)
def test_answers_and_models_name_the_space_and_another_one_is_refused(
    server: Server, store: Store, route: str, model: str, roles: int
) -> None:
    task = route[1:].replace("_", "-")
    own = str(space(store.manifest(model), task))
    url, body = server.url + route, {"inputs": "a red house", "model": model}
    assert httpx.post(url, json=body, headers={EXPECTED: own}).headers[HEADER] == own
    refused = httpx.post(url, json=body, headers={EXPECTED: "0123456789abcdef"})
    assert error_of(refused) == (412, "other_embedding_space")
    roles_of = ({**body, "input_type": role} for role in ("document", "query"))
    by_role = [httpx.post(url, json=each).headers[HEADER] for each in roles_of]
    assert by_role[0] == own
    assert len(set(by_role)) == roles
    infos = {each["name"]: each for each in httpx.get(f"{server.url}/info").json()["models"]}
    assert infos[model]["embedding_spaces"][task] == own
    if model == "pylate":
        named = [infos[model]["roles"][r]["embedding_space"] for r in ("document", "query")]
        assert named == by_role


def test_a_bundle_of_an_earlier_release_has_no_name_for_them(store: Store) -> None:
    described = store.manifest("bge")
    source = described.source.model_copy(update={"parts_sha256": {}})
    earlier = described.model_copy(update={"source": source})
    spaces = {task: space(earlier, task) for task in own_recipes(earlier)}
    assert spaces == {"embed": space(described, "embed"), "embed-all": None, "embed-sparse": None}
    assert b"parts_sha256" not in earlier.to_bytes()
    assert Manifest.from_bytes(described.to_bytes()).source == described.source


class M3:
    """FlagEmbedding's three vectors of a BGE-M3, over transformers' encoder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.encoder = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
        self.sparse, self.colbert = (
            torch.load(folder / f"{name}_linear.pt", weights_only=True)
            for name in ("sparse", "colbert")
        )

    @torch.no_grad()
    def __call__(self, text: str) -> tuple[Floats, dict[int, float], Floats]:
        ids = self.tokenizer.encode(text).ids
        ids = ids if len(ids) <= 64 else [*ids[:63], ids[-1]]
        hidden = self.encoder(torch.tensor([ids])).last_hidden_state[0]
        normalize = torch.nn.functional.normalize
        dense = normalize(hidden[:1], dim=1)[0].numpy()
        weights = torch.relu(hidden @ self.sparse["weight"].T + self.sparse["bias"])[:, 0].tolist()
        largest: dict[int, float] = {}
        for number, weight in zip(ids, weights, strict=True):
            if number > 3 and weight > 0:  # <s>, <pad>, </s> and <unk> are 0 to 3
                largest[number] = max(weight, largest.get(number, 0.0))
        rows = normalize(hidden[1:] @ self.colbert["weight"].T + self.colbert["bias"], dim=1)
        return dense, largest, rows.numpy()


M3_TEXTS = ["A ship left the harbour.", "the king the king", "Snow \N{SNOWMAN} falls"]


def test_three_heads_of_a_bge_m3_are_those_of_its_library(
    server: Server, folders: dict[str, Path]
) -> None:
    oracle, routes = M3(folders["bge"]), ("/embed", "/embed_sparse", "/embed_all")
    asked = (answer(server, route, inputs=M3_TEXTS, model="bge").json() for route in routes)
    answers = zip(*asked, strict=True)
    for text, (dense, sparse, rows) in zip(M3_TEXTS, answers, strict=True):
        expected = oracle(text)
        np.testing.assert_allclose(dense, expected[0], atol=2e-5)
        weights = {row["index"]: row["value"] for row in sparse}
        assert weights == pytest.approx(expected[1], abs=2e-5)
        assert list(weights.values()) == sorted(weights.values(), reverse=True)
        np.testing.assert_allclose(rows, expected[2], atol=2e-5)
    assert any(oracle(text)[1] for text in M3_TEXTS)
    query, documents = oracle(QUERIES[0])[2], [oracle(text)[2] for text in DOCUMENTS]
    expected_scores = [max_sim(query, document) / len(query) for document in documents]
    ours = {row["index"]: row["score"] for row in ranks(server, "bge", QUERIES[0])}
    assert [ours[i] for i in range(4)] == pytest.approx(expected_scores, abs=1e-4)


@pytest.mark.parametrize(("settings", "problem"), [
    ({"query_prefix": "[Query] "}, "no token"), ({"prompts": {"query": "search: "}}, "prompts"),
    ({"prompts": ["search: "]}, "prompts"), ({"skiplist_words": "."}, "skiplist_words"),
    ({"query_length": 3}, "query tokens"), ({"attend_to_expansion_tokens": "some"}, "attends_to_filling"),
])  # fmt: skip
def test_settings_of_pylate_that_are_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ExportError, match=problem):
        load_checkpoint(str(late_models.pylate(tmp_path / "late", **settings)))


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code of a pickle ran",))


@pytest.mark.parametrize("name", ["colbert_linear.pt", "sparse_linear.pt"])
def test_pickles_beside_a_bge_m3_run_no_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    folder, bias = late_models.bge_m3(tmp_path / "bge"), torch.zeros(1)
    for content, problem in (
        (Harmful(), name),
        ({"weight": torch.zeros(1, 3), "bias": bias}, "shape"),
        ({"weight": torch.full((1, 24), torch.nan), "bias": bias}, "NaN"),
        ({"weight": torch.zeros(1, 24)}, "not one linear layer"),
    ):
        if isinstance(content, Harmful):
            (folder / name).write_bytes(pickle.dumps(content))
        else:
            torch.save(content, folder / name)
        with pytest.raises(ExportError, match=problem):
            load_checkpoint(str(folder))
    assert "code of a pickle ran" not in capfd.readouterr().out
