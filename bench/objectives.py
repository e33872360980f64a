"""Compares pre-training objectives on equal compute, at tiny size: which one to choose, measured and not believed.

    python bench/objectives.py DATA RUNS >bench/results/objectives.md

DATA is a folder with corpus/corpus.jsonl.xz, qa/squad-v1.1.json.xz and eval/stsb-en-{train.csv.xz,dev.csv}; RUNS is where runs
lie (one that was stopped goes on). Every objective learns from the same every 24th document, with one vocabulary, for the same
number of sequences; replaced-token detection, whose generator costs more, for as many fewer as its measured tokens a second ask.
Then each is fine-tuned alike, and measured on held-out documents, pairs and articles.
"""

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

EVERY = 24
STEPS = 2500
"""Enough to leave the plateau on which a model knows only how frequent words are; after 900 of a larger one all stood at 6 %."""

HELD_OUT = "0.08"

SHARE_OF_STEPS = {"replaced tokens": 0.8}
"""By how much an objective's tokens a second are fewer."""

SENTENCE_NONE = {"sentence": "none"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "tokens, static": {"dynamic": False, **SENTENCE_NONE},
    "tokens, dynamic": SENTENCE_NONE,
    "whole words": {"unit": "whole-word", **SENTENCE_NONE},
    "spans": {"unit": "span", **SENTENCE_NONE},
    "spans and boundaries": {"unit": "span", "span_boundary": True, **SENTENCE_NONE},
    "replaced tokens": {"method": "rtd", **SENTENCE_NONE},
    "tokens, next sentence": {"sentence": "nsp"},
    "tokens, sentence order": {"sentence": "sop"},
}

PRETRAIN = """seed = 1
held_out = {held_out}
[model]
hidden_size = 128
layers = 2
heads = 2
intermediate_size = 512
max_tokens = 128
dropout = 0.0
[optimisation]
learning_rate = 3e-3
[pretraining]
{pretraining}
[[phases]]
tokens = 32
sequences = 128
steps = {first}
[[phases]]
tokens = 64
sequences = 64
steps = {second}
"""

EMBED = "epochs = 3\ntext_weight = 0.0\n[optimisation]\nlearning_rate = 3e-4\n"
QUESTIONS = f"epochs = 1\ntokens = 128\nstride = 48\nquestion_tokens = 32\nheld_out = {HELD_OUT}\n[optimisation]\nlearning_rate = 1e-3\n"

COLUMNS = {
    "fill_mask_token_top1": "fill-mask top-1, tokens",
    "fill_mask_whole_word_top1": "top-1, whole words",
    "nsp_accuracy": "next sentence",
    "sts_spearman": "STS-B Spearman",
    "qa_f1": "SQuAD F1",
}


def cloze(*arguments: str | Path) -> str:
    """A command of Cloze, in this environment."""
    done = subprocess.run(
        [sys.executable, "-m", "cloze", *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def write(file: Path, text: str) -> Path:
    """Write a file and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def subset(corpus: Path, file: Path) -> Path:
    """Every 24th document: so little that there are several epochs, without which static and dynamic are the same."""
    if not file.exists():
        with lzma.open(corpus, "rt") as stream:
            write(file, "".join(line for number, line in enumerate(stream) if number % EVERY == 0))
    return file


def pretrain(
    folder: Path, text: Path, vocabulary: Path, objective: dict[str, Any], share: float
) -> dict[str, Any]:
    """Train; returns the last line of the log."""
    said = "\n".join(f"{name} = {json.dumps(value)}" for name, value in objective.items())
    steps = round(STEPS * share)
    recipe = PRETRAIN.format(
        held_out=HELD_OUT, pretraining=said, first=steps * 3 // 5, second=steps - steps * 3 // 5
    )
    out = folder / "pretrained"
    if not (out / "checkpoint/README.md").exists():
        recipe_file = write(folder / "pretrain.toml", recipe)
        cloze(
            "train",
            "pretrain",
            "--corpus",
            text,
            "--recipe",
            recipe_file,
            "--vocab",
            vocabulary,
            "--out",
            out,
        )
    last: dict[str, Any] = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    return last


def finetune_and_measure(folder: Path, data: Path) -> dict[str, float]:
    """Figures of the checkpoint, and of the same after fine-tuning."""
    source, pairs, squad = (
        folder / "pretrained/checkpoint",
        data / "eval/stsb-en-train.csv.xz",
        data / "qa/squad-v1.1.json.xz",
    )
    unseen = data / "eval/stsb-en-dev.csv"
    embed, questions = folder / "embed", folder / "questions"
    if not (embed / "checkpoint/README.md").exists():
        recipe = write(folder / "embed.toml", EMBED)
        cloze(
            "train", "finetune-embed", source, "--pairs", pairs, "--recipe", recipe, "--out", embed
        )
    if not (questions / "checkpoint/README.md").exists():
        recipe = write(folder / "questions.toml", QUESTIONS)
        cloze(
            "train",
            "finetune-qa",
            source,
            "--questions",
            squad,
            "--recipe",
            recipe,
            "--out",
            questions,
        )
    text = ("--corpus", data / "corpus/corpus.jsonl.xz", "--held-out", HELD_OUT, "--json")
    measured = json.loads(cloze("train", "evaluate", source, *text, "--pairs", unseen))
    measured |= json.loads(
        cloze("train", "evaluate", embed / "checkpoint", "--pairs", unseen, "--json")
    )
    measured |= json.loads(
        cloze(
            "train",
            "evaluate",
            questions / "checkpoint",
            "--questions",
            squad,
            "--held-out",
            HELD_OUT,
            "--json",
        )
    )
    figures: dict[str, float] = measured
    return figures


def main(data: Path, runs: Path) -> None:
    """Print the table, a row when it is done."""
    text = subset(data / "corpus/corpus.jsonl.xz", runs / "text.jsonl")
    vocabulary = runs / "vocabulary"
    if not (vocabulary / "vocab.txt").exists():
        cloze("train", "vocab", "--corpus", text, "--size", "4000", "--out", vocabulary)
    print("| objective | tokens seen | seconds | " + " | ".join(COLUMNS.values()) + " |")
    print("|---|" + "---|" * (len(COLUMNS) + 2))
    for name, objective in OBJECTIVES.items():
        folder = runs / name.replace(",", "").replace(" ", "-")
        log = pretrain(folder, text, vocabulary, objective, SHARE_OF_STEPS.get(name, 1.0))
        figures = finetune_and_measure(folder, data)
        cells = [
            f"{figures[key] / (100 if key == 'qa_f1' else 1):.3f}" if key in figures else "-"
            for key in COLUMNS
        ]
        print(
            f"| {name} | {log['tokens_seen']:,} | {log['seconds']:.0f} | "
            + " | ".join(cells)
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
