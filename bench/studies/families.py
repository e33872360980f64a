"""Measures every model family at one size: our server in fp32 and int8, and a peer on the same weights.

    python bench/studies/families.py WORK [--tei BINARY] [--seconds 2] [--turns 3] [FAMILY ...]

The checkpoints have random weights, MiniLM's sizes and one WordPiece tokenizer, so a difference
between two families is that of their encoders. They, their bundles and the results are written to
the folder WORK. Prints a table of texts per second.
"""

import argparse
import json
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
from cloze.model_store.manifest import Precision

SIZES = {
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
}
OFFSET = {"roberta", "xlm-roberta", "camembert", "mpnet"}
KINDS = ("questions", "passages")
CLIENTS = (1, 32)


def checkpoint(family: str, tokenizer: Path, folder: Path) -> Path:
    """Write a random checkpoint of a family with a plain graph for peers; return its folder."""
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer))
    first = 2 if family in OFFSET else 0
    config = transformers.CONFIG_MAPPING[family](
        **SIZES | OWN.get(family, {}),
        vocab_size=len(words),
        max_position_embeddings=512 + first,
        pad_token_id=1 if first else 0,
    )
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)
    write_plain(folder)
    return folder


def measure(family: str, store: Path, folder: Path, arguments: argparse.Namespace) -> Path:
    """Run ``cloze bench run``; return the file of its figures."""
    out = arguments.work / f"{family}-cpu"
    command = [sys.executable, "-m", "cloze", "bench", "run", "--model", family]
    command += ["--model-store", str(store), "--checkpoint", str(folder), "--no-bulk"]
    command += ["--shares", "", "--clients", ",".join(map(str, CLIENTS)), "--out", str(out)]
    command += [part for kind in KINDS for part in ("--texts", kind)]
    command += [part for precision in ("fp32", "int8") for part in ("--precision", precision)]
    command += ["--seconds", str(arguments.seconds), "--turns", str(arguments.turns)]
    if arguments.tei:
        command += ["--tei", arguments.tei]
    subprocess.run(command, check=True)
    return out.with_suffix(".json")


def main() -> None:
    """Measure the families of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; default: cloze-bert's")
    parser.add_argument("--tei", help="the program text-embeddings-inference")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    store = arguments.work / "store"
    for family in arguments.families:
        folder = arguments.work / "checkpoints" / family
        if not folder.is_dir():
            checkpoint(family, arguments.tokenizer or Store().open("cloze-bert").path / "tokenizer.json", folder)
            export(str(folder), family, Store(store), ExportOptions(precisions=(Precision.INT8,)), print)
        print(family, json.loads(measure(family, store, folder, arguments).read_text())["loads"])


if __name__ == "__main__":
    main()
