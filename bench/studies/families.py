"""Measures every model family at one size: our server, and a peer on the same weights.

    python bench/studies/families.py WORK [--tei BINARY] [--seconds 2] [--turns 3] [FAMILY ...]

The checkpoints have random weights, MiniLM's sizes and one WordPiece tokenizer, so a difference
between two families is that of their encoders. They, their bundles and the results of ``cloze bench
run`` are written to the folder WORK.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from cloze.bench.peers.plain_onnx import write as write_plain
from cloze.export.families import FAMILIES
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
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
}
OFFSET = {"roberta", "xlm-roberta", "camembert", "mpnet"}
FIXED = ("--no-bulk", "--shares", "0.5", "--clients", "1,32")
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
    sizes = SIZES | OWN.get(family, {}) | {"vocab_size": len(words)}
    sizes |= {"max_position_embeddings": 512 + first, "pad_token_id": 1 if first else 0}
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
    arguments = parser.parse_intermixed_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    store = arguments.work / "store"
    for family in arguments.families:
        folder = arguments.work / "checkpoints" / family
        if not folder.is_dir():
            checkpoint(family, arguments.tokenizer, folder)
            options = ExportOptions(precisions=(Precision.INT8,))
            export(str(folder), family, Store(store), options, print)
        measure(family, store, folder, arguments)


if __name__ == "__main__":
    main()
