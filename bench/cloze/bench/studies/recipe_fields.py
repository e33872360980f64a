"""Compares the fields of pre-training recipes on equal text, from nothing and from a checkpoint.

    python bench/studies/recipe_fields.py DATA RUNS CHECKPOINT

DATA is a folder with corpus/corpus-modern.jsonl.xz and eval/stsb-en-dev.csv, and CHECKPOINT is one
of all-MiniLM-L6-v2. RUNS is the folder of the runs; a stopped run continues.

Each run changes one field of a plain recipe: AdamW with one learning rate. The plain recipe runs
with two seeds, so that the table shows how much chance alone changes.
"""

import argparse
import json
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cloze.bench.studies.objectives import HELD_OUT, cloze, evaluate, is_done, subset, write

SEED, OTHER_SEED = 1, 2
COLUMNS: Final = {
    "fill_mask_token_top1": "tokens, top-1",
    "fill_mask_whole_word_top1": "whole words, top-1",
    "nsp_accuracy": "next sentence",
    "sts_spearman": "STS-B Spearman",
}


@dataclass(frozen=True)
class Origin:
    """One of the two starts.

    Attributes:
        name: the heading of its table.
        tables: the other tables of its recipes, as text.
        plain: the fields of the plain recipe, by table.
        rates: what replaces its one learning rate.
        keeps_embeddings: whether STS-B is measured.
    """

    name: str
    tables: str
    plain: dict[str, dict[str, Any]]
    rates: dict[str, float]
    keeps_embeddings: bool


STARTS: Final = (
    Origin(
        "from a checkpoint",
        "[model]\ndropout = 0.0\n[[phases]]\ntokens = 64\nsequences = 48\nsteps = 140\n",
        {
            "pretraining": {
                "unit": "whole-word",
                "sentence": "nsp",
                "keep_embeddings": True,
                "embedding_weight": 20.0,
                "embedding_tokens": 512,
            },
            "optimisation": {"learning_rate": 4e-4},
        },
        {"embedding_learning_rate": 2e-4, "head_learning_rate": 2e-3},
        keeps_embeddings=True,
    ),
    Origin(
        "from nothing",
        "[vocabulary]\nsize = 4000\n"
        "[model]\nhidden_size = 128\nlayers = 2\nheads = 2\nintermediate_size = 512\n"
        "max_tokens = 128\ndropout = 0.0\n"
        "[[phases]]\ntokens = 32\nsequences = 96\nsteps = 600\n"
        "[[phases]]\ntokens = 64\nsequences = 48\nsteps = 250\n",
        {
            "pretraining": {"unit": "whole-word", "sentence": "nsp"},
            "optimisation": {"learning_rate": 3e-3},
        },
        {"embedding_learning_rate": 1e-3, "head_learning_rate": 3e-3},
        keeps_embeddings=False,
    ),
)


def changes(start: Origin) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what each run changes in the plain recipe, by the name of its row."""
    alone: dict[str, dict[str, dict[str, Any]]] = {
        "mask rate 0.30 to 0.15": {"pretraining": {"rate": 0.3, "final_rate": 0.15}},
        "average of the last fifth": {"optimisation": {"average": 0.2}},
        "rates of embeddings and heads": {"optimisation": start.rates},
        "weight decay 0.1": {"optimisation": {"weight_decay": 0.1}},
    }
    every: dict[str, dict[str, Any]] = {"pretraining": {}, "optimisation": {}}
    for change in alone.values():
        for table, fields in change.items():
            every[table] |= fields
    return {"plain": {}, "plain, another seed": {}, **alone, "all of them": every}


def recipe(start: Origin, change: dict[str, dict[str, Any]], seed: int) -> str:
    """Return a recipe's text."""
    lines = [f"seed = {seed}", f"held_out = {HELD_OUT}"]
    for table, plain in start.plain.items():
        fields = plain | change.get(table, {})
        lines += [
            f"[{table}]",
            *(f"{name} = {json.dumps(value)}" for name, value in fields.items()),
        ]
    return "\n".join(lines) + "\n" + start.tables


def train(out: Path, text: Path, recipe_file: Path, source: tuple[str | Path, ...]) -> None:
    """Train, and note the processor's seconds, which do not depend on other work."""
    if is_done(out):
        return
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    cloze("train", "pretrain", "--corpus", text, *source, "--recipe", recipe_file, "--out", out)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    write(out / "seconds.json", json.dumps(seconds))


def main() -> None:
    """Train, measure, and print a table per start."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("runs", type=Path)
    parser.add_argument("checkpoint", type=Path)
    options = parser.parse_args()
    text = subset(options.data / "corpus/corpus-modern.jsonl.xz", options.runs / "text.jsonl")
    pairs = ("--pairs", options.data / "eval/stsb-en-dev.csv")
    for start in STARTS:
        names = dict(list(COLUMNS.items())[: None if start.keeps_embeddings else -1])
        print(f"\n| {start.name} | {' | '.join(names.values())} | processor s |", flush=True)
        print("|" + "---|" * (len(names) + 2), flush=True)
        source = ("--from", options.checkpoint) if start.keeps_embeddings else ()
        for row, change in changes(start).items():
            folder = options.runs / start.name / row
            seed = OTHER_SEED if "seed" in row else SEED
            recipe_file = write(folder / "recipe.toml", recipe(start, change, seed))
            run = folder / "run"
            train(run, text, recipe_file, source)
            measured = ("--corpus", text, "--held-out", HELD_OUT)
            figures = evaluate(
                run / "checkpoint", *measured, *(pairs if start.keeps_embeddings else ())
            )
            cells = [f"{figures[name]:.3f}" for name in names]
            seconds = json.loads((run / "seconds.json").read_text())
            print(f"| {row} | {' | '.join(cells)} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
