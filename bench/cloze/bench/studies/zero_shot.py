"""Measures 600 own labels for one text: our server, and transformers' pipeline on the same weights.

    python bench/studies/zero_shot.py WORK [--labels 600] [--turns 3]

The classifier has random weights, MiniLM's sizes and the tokenizer of cloze-bert. It and its bundle
are written to the folder WORK. The contestants take turns, and each has all cores.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from cloze.bench.machine import describe_machine
from cloze.bench.processes import RunningServer, free_port, running
from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Precision

TEXT = (
    "The committee met for the third time this year and could not agree on who should pay for the "
    "repair of the bridge, which has been closed since the flood in spring. Trade on both banks of "
    "the river suffers, and the ferry takes an hour."
)
NAMES = ("contradiction", "neutral", "entailment")


def checkpoint(folder: Path) -> None:
    """Write a random classifier of inferences."""
    file = DEFAULT_ROOT / "cloze-bert/1/tokenizer.json"
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    }
    words = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(file), model_max_length=512, **special
    )
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=384,
        num_hidden_layers=6,
        intermediate_size=1536,
        num_attention_heads=12,
        id2label=dict(enumerate(NAMES)),
        label2id={name: number for number, name in enumerate(NAMES)},
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    words.save_pretrained(folder)


def served(store: Path, precision: str) -> AbstractContextManager[RunningServer]:
    """Run a server until the context ends."""
    port = free_port()
    command = [sys.executable, "-m", "cloze", "serve", "--model-store", str(store)]
    command += ["--port", str(port), "--precision", precision]
    return running(command, f"http://127.0.0.1:{port}", "/readyz")


def ask(url: str, labels: list[str]) -> dict[str, float]:
    """Return the scores of our server."""
    body = {"inputs": TEXT, "parameters": {"candidate_labels": labels}}
    answer = httpx.post(f"{url}/zero-shot-classification", json=body, timeout=300)
    return {row["label"]: row["score"] for row in answer.raise_for_status().json()}


def pipeline(folder: Path, labels: list[str], batch_size: int) -> Callable[[], dict[str, float]]:
    """Return a function that asks transformers' pipeline."""
    made: Any = transformers.pipeline("zero-shot-classification", model=str(folder), device="cpu")

    def run() -> dict[str, float]:
        answer = made(TEXT, candidate_labels=labels, batch_size=batch_size)
        return dict(zip(answer["labels"], answer["scores"], strict=True))

    return run


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path)
    parser.add_argument("--labels", type=int, default=600)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    folder, store = arguments.work / "checkpoint", arguments.work / "store"
    if not folder.is_dir():
        checkpoint(folder)
        export(str(folder), "nli", Store(store), ExportOptions(precisions=(Precision.INT8,)))
    labels = [f"the matter of number {number}" for number in range(arguments.labels)]
    print(describe_machine(os.cpu_count() or 1))
    with served(store, "fp32") as fp32, served(store, "int8") as int8:
        contestants: dict[str, Callable[[], dict[str, float]]] = {
            "Cloze, fp32": lambda: ask(fp32.url, labels),
            "Cloze, int8": lambda: ask(int8.url, labels),
            "transformers' pipeline": pipeline(folder, labels, 1),
            "transformers' pipeline, batch_size=32": pipeline(folder, labels, 32),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        scores: dict[str, dict[str, float]] = {}
        for _ in range(arguments.turns):
            for name, contestant in contestants.items():
                started = time.perf_counter()
                scores[name] = contestant()
                seconds[name].append(time.perf_counter() - started)
    exact = scores["transformers' pipeline"]
    print("| contestant | median s | least s | most s | largest difference of a score |")
    print("|---|---:|---:|---:|---:|")
    for name, times in seconds.items():
        difference = max(abs(scores[name][label] - exact[label]) for label in labels)
        shown = f"{statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f}"
        print(f"| {name} | {shown} | {difference:.1e} |")


if __name__ == "__main__":
    main()
