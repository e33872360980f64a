"""Compares pre-training objectives on equal compute, at tiny size.

    python bench/studies/objectives.py DATA RUNS >bench/results/objectives.md

DATA is a folder with corpus/corpus.jsonl.xz, qa/squad-v1.1.json.xz and
eval/stsb-en-{train.csv.xz,dev.csv}. RUNS is the folder of the runs; a stopped run continues.

Every objective trains on every 24th document, with one vocabulary and the same number of sequences.
Replaced-token detection trains for fewer steps, because its generator costs time: its share of the
steps follows from its measured tokens per second. Each checkpoint is fine-tuned in the same way,
and measured on held-out documents, pairs and articles.
"""

import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

EVERY = 24
STEPS = 2500
"""Enough to leave the plateau on which a model predicts only the frequency of words.

After 900 steps of a larger model, all objectives were at 6 %.
"""

HELD_OUT = "0.08"

SHARE_OF_STEPS = {"replaced tokens": 0.8}
"""Tokens per second of an objective over those of the others."""

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

EMBED = "epochs = 3\n[optimisation]\nlearning_rate = 3e-4\n"
QUESTIONS = f"""epochs = 1
tokens = 128
stride = 48
question_tokens = 32
held_out = {HELD_OUT}
[optimisation]
learning_rate = 1e-3
"""

COLUMNS = {
    "fill_mask_token_top1": "fill-mask top-1, tokens",
    "fill_mask_whole_word_top1": "top-1, whole words",
    "nsp_accuracy": "next sentence",
    "sts_spearman": "STS-B Spearman",
    "qa_f1": "SQuAD F1",
}


def cloze(*arguments: str | Path) -> str:
    """Run a command of Cloze in this environment, and return its output."""
    command = [sys.executable, "-m", "cloze", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def evaluate(checkpoint: Path, *data: str | Path) -> dict[str, float]:
    """Return the figures of a checkpoint on held-out data."""
    figures: dict[str, float] = json.loads(cloze("train", "evaluate", checkpoint, *data, "--json"))
    return figures


def write(file: Path, text: str) -> Path:
    """Write a file and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def subset(corpus: Path, file: Path) -> Path:
    """Write every 24th document to `file`.

    The text is short enough for several epochs; in one epoch, static and dynamic masks are the
    same.
    """
    if not file.exists():
        with lzma.open(corpus, "rt") as stream:
            write(file, "".join(line for number, line in enumerate(stream) if number % EVERY == 0))
    return file


def pretrain(
    folder: Path, text: Path, vocabulary: Path, objective: dict[str, Any], share: float
) -> dict[str, Any]:
    """Train with an objective for a share of the steps; return the last line of the log."""
    out = folder / "pretrained"
    if not is_done(out):
        fields = "\n".join(f"{name} = {json.dumps(value)}" for name, value in objective.items())
        steps = round(STEPS * share)
        first = steps * 3 // 5
        recipe = PRETRAIN.format(
            held_out=HELD_OUT, pretraining=fields, first=first, second=steps - first
        )
        recipe_file = write(folder / "pretrain.toml", recipe)
        source = ("--corpus", text, "--vocab", vocabulary)
        cloze("train", "pretrain", *source, "--recipe", recipe_file, "--out", out)
    last: dict[str, Any] = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    return last


def is_done(run: Path) -> bool:
    """Return whether a run has written its checkpoint."""
    return (run / "checkpoint/README.md").exists()


def finetune_and_measure(folder: Path, data: Path) -> dict[str, float]:
    """Return the figures of the checkpoint, and of the checkpoint after fine-tuning."""
    source = folder / "pretrained/checkpoint"
    squad = data / "qa/squad-v1.1.json.xz"
    embed, questions = folder / "embed", folder / "questions"
    if not is_done(embed):
        recipe = write(folder / "embed.toml", EMBED)
        pairs = ("--pairs", data / "eval/stsb-en-train.csv.xz")
        cloze("train", "finetune-embed", source, *pairs, "--recipe", recipe, "--out", embed)
    if not is_done(questions):
        recipe = write(folder / "questions.toml", QUESTIONS)
        command = ("train", "finetune-qa", source, "--questions", squad)
        cloze(*command, "--recipe", recipe, "--out", questions)
    text = ("--corpus", data / "corpus/corpus.jsonl.xz", "--held-out", HELD_OUT)
    unseen_pairs = ("--pairs", data / "eval/stsb-en-dev.csv")
    unseen_questions = ("--questions", squad, "--held-out", HELD_OUT)
    figures = evaluate(source, *text, *unseen_pairs)
    figures |= evaluate(embed / "checkpoint", *unseen_pairs)
    figures |= evaluate(questions / "checkpoint", *unseen_questions)
    return figures


def main(data: Path, runs: Path) -> None:
    """Print the table; each row appears when its objective is measured."""
    text = subset(data / "corpus/corpus.jsonl.xz", runs / "text.jsonl")
    vocabulary = runs / "vocabulary"
    if not (vocabulary / "tokenizer.json").exists():
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
        cost = f"{log['tokens_seen']:,} | {log['seconds']:.0f}"
        print(f"| {name} | {cost} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
