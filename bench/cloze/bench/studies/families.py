"""Measures every model family at one size: our server, and a peer on the same weights.

    python bench/studies/families.py WORK [--tei BINARY] [--seconds 2] [--turns 3] [FAMILY ...]
    python bench/studies/families.py WORK --graphs 1x16 8x128 1x512 -- [FAMILY ...]

The checkpoints have random weights, MiniLM's sizes and one WordPiece tokenizer, so a difference
between two families is that of their encoders. They, their bundles and the results of ``cloze bench
run`` are written to the folder WORK. With ``--graphs``, no server runs: the bundle's graphs, the
plain graph and transformers take turns on one thread, for batches of TEXTSxTOKENS, and medians of
milliseconds are printed. A bundle returns one vector per text, its peers the states of all tokens.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
import transformers

from cloze.bench.peers.plain_onnx import write as write_plain
from cloze.export.families import FAMILIES
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.batch import BatchCodec, Encoding
from cloze.model_store.heads import HeadRequest, embedding
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Precision

SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-12,
}
OWN: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 384, "n_layers": 6, "n_heads": 12, "hidden_dim": 1536},
    "electra": {"embedding_size": 128},
    "albert": {"embedding_size": 128},
    "deberta-v2": {
        "relative_attention": True,
        "position_biased_input": False,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
    },
    "modernbert": {"max_position_embeddings": 8192},
}
ROUNDS, LEAST_S = 7, 0.2
"""Turns of each subject, and the least time of one turn."""

OFFSET = {"roberta", "xlm-roberta", "camembert", "mpnet"}
FIXED = ("--no-bulk", "--shares", "", "--clients", "1,32")
KINDS = (
    "--texts",
    "questions",
    "--texts",
    "passages",
    "--precision",
    "fp32",
    "--precision",
    "int8",
)


def checkpoint(family: str, tokenizer: Path, folder: Path) -> None:
    """Write a random checkpoint of a family, with a plain graph for peers."""
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))  # type: ignore[no-untyped-call]
    first = 2 if family in OFFSET else 0
    sizes = SIZES | {"max_position_embeddings": 512 + first, "pad_token_id": 1 if first else 0}
    sizes |= OWN.get(family, {}) | {"vocab_size": len(words)}
    words.model_max_length = sizes["max_position_embeddings"] - first
    config = transformers.CONFIG_MAPPING[family](**sizes)
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    words.save_pretrained(folder)
    write_plain(folder)


def measure(family: str, store: Path, folder: Path, arguments: argparse.Namespace) -> None:
    """Run ``cloze bench run``, which writes its results to the folder of the command line."""
    command = [sys.executable, "-m", "cloze", "bench", "run", "--model", family, *FIXED, *KINDS]
    command += ["--model-store", str(store), "--checkpoint", str(folder)]
    command += ["--out", str(arguments.work / f"{family}-cpu")]
    command += ["--seconds", str(arguments.seconds), "--turns", str(arguments.turns)]
    command += ["--tei", arguments.tei] if arguments.tei else []
    subprocess.run(command, check=True)


def compare_graphs(family: str, store: Store, folder: Path, shape: str) -> None:
    """Print the median milliseconds of one batch, of each subject in turn on one thread."""
    texts, tokens = map(int, shape.split("x"))
    ids = np.random.default_rng(0).integers(1000, 20_000, (texts, tokens))
    torch.set_num_threads(1)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(texts, tokens).long()}
    subjects: dict[str, Callable[[], object]] = {
        f"cloze {precision}": _our_graph(store, family, precision, ids)
        for precision in (Precision.FP32, Precision.INT8)
    }
    plain = {name: tensor.numpy() for name, tensor in rows.items()}
    plain["token_type_ids"] = np.zeros_like(ids)
    subjects["plain graph"] = _session(folder / "onnx" / "model.onnx", plain)
    subjects["transformers"] = torch.inference_mode()(partial(model, **rows))
    spent: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(ROUNDS):
        for name, run in subjects.items():
            begin, count = time.perf_counter(), 0
            while time.perf_counter() - begin < LEAST_S:
                run()
                count += 1
            spent[name].append(1000 * (time.perf_counter() - begin) / count)
    medians = [f"{statistics.median(times):.2f}" for times in spent.values()]
    print(f"| {family} | {texts} x {tokens} |", " | ".join(medians), "|", flush=True)


def _our_graph(
    store: Store, family: str, precision: Precision, ids: np.ndarray
) -> Callable[[], object]:
    bundle = store.open(family)
    graph = bundle.manifest.graph_of(precision)
    assert graph is not None
    types, asked = np.zeros(ids.shape[1], np.int32), {embedding.HEAD.name: HeadRequest()}
    batch = BatchCodec(bundle.manifest.graph_spec(graph.layout)).pack(
        [Encoding(row.astype(np.int32), types, asked) for row in ids]
    )
    return _session(bundle.path / graph.file, batch.feeds, batch.outputs)


def _session(
    file: Path, feeds: Mapping[str, np.ndarray], outputs: Any = None
) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(file, options)
    known = {each.name for each in session.get_inputs()}
    return partial(session.run, outputs, {n: value for n, value in feeds.items() if n in known})


def main() -> None:
    """Measure the families of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    tokenizer = DEFAULT_ROOT / "cloze-bert/1/tokenizer.json"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer, help="a tokenizer.json")
    parser.add_argument("--tei", help="the program text-embeddings-inference")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--graphs", nargs="+", metavar="TEXTSxTOKENS", default=())
    arguments = parser.parse_intermixed_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    store = arguments.work / "store"
    for family in arguments.families:
        folder = arguments.work / "checkpoints" / family
        if not folder.is_dir():
            checkpoint(family, arguments.tokenizer, folder)
            options = ExportOptions(precisions=(Precision.INT8,))
            export(str(folder), family, Store(store), options, print)
        for shape in arguments.graphs:
            compare_graphs(family, Store(store), folder, shape)
        if not arguments.graphs:
            measure(family, store, folder, arguments)


if __name__ == "__main__":
    main()
