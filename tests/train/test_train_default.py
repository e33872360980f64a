"""`scripts/train-default` makes the default models from a checkpoint and text, here in two steps
per run and from a fraction of the text.
"""

import itertools
import json
import lzma
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cloze.model_store import Store
from tests.conftest import minilm_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
NAMES = ["cloze-bert", "cloze-bert-tasks", "cloze-distilbert"]


def some_documents(corpus: Path, number: int) -> Iterator[str]:
    """Yield the first documents of a corpus, and of each only the beginning."""
    with lzma.open(corpus, "rt") as lines:
        for line in itertools.islice(lines, number):
            document = json.loads(line)
            yield json.dumps(document | {"text": document["text"][:8000]}) + "\n"


def some_questions(file: Path) -> dict[str, Any]:
    """Return the first ten questions of 40 articles."""
    with lzma.open(file, "rt") as stream:
        articles = json.load(stream)["data"][:40]
    for article in articles:
        article["paragraphs"] = article["paragraphs"][:1]
        article["paragraphs"][0]["qas"] = article["paragraphs"][0]["qas"][:10]
    return {"data": articles}


def copy_some_rows(file: Path, small: Path) -> None:
    """Copy every fifth row of a file of labels or tags, so that no label is missing."""
    opened = lzma.open if file.suffix == ".xz" else open
    small.parent.mkdir(parents=True, exist_ok=True)
    with opened(file, "rt") as lines, opened(small, "wt") as target:
        target.writelines(itertools.islice(lines, 0, None, 5))


def make_small(data: Path, small: Path) -> None:
    """Write a folder like that of the data, with little text."""
    for name in ("corpus", "qa", "eval"):
        (small / name).mkdir(parents=True)
    for name in ("crows-pairs.csv", "stsb-en-dev.csv"):
        with (data / "eval" / name).open() as lines:
            (small / "eval" / name).write_text("".join(itertools.islice(lines, 60)))
    with lzma.open(small / "corpus/corpus-modern.jsonl.xz", "wt") as file:
        file.writelines(some_documents(data / "corpus/corpus-modern.jsonl.xz", 200))
    for name in ("squad-v1.1", "squad-v2.0", "natural-questions-qed"):
        with lzma.open(small / "qa" / f"{name}.json.xz", "wt") as file:
            json.dump(some_questions(data / "qa" / f"{name}.json.xz"), file)
    recipe = tomllib.loads((ROOT / "scripts/recipes/finetune-tasks-from-minilm.toml").read_text())
    for task in recipe["task"]:
        for name in [*task.get("learnt", ()), *task.get("measured", ())]:
            copy_some_rows(data / name, small / name)


def test_the_script_makes_every_default_model_and_repeats_no_finished_run(
    external_data: Path, tmp_path: Path
) -> None:
    make_small(external_data, tmp_path / "data")
    binaries, log = tmp_path / "bin", tmp_path / "calls"
    binaries.mkdir()
    for name, arguments in (("cloze", f"-m tests.support.short_cloze {log}"), ("python", "")):
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (binaries / name).chmod(0o755)
    folders = [tmp_path / "data", minilm_checkpoint(), tmp_path / "runs", tmp_path / "store"]

    def run() -> list[list[str]]:
        """Run the script, and return the calls of ``cloze``."""
        log.unlink(missing_ok=True)
        command = [ROOT / "scripts" / "train-default", binaries, *folders]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return [json.loads(line) for line in log.read_text().splitlines()]

    trained = [call[1] for call in run() if call[0] == "train" and call[1] != "evaluate"]
    assert trained.count("pretrain") == 5
    assert Store(folders[-1]).references() == [f"{name}@1" for name in NAMES]
    again = [call[1] for call in run() if call[0] == "train" and call[1] != "evaluate"]
    assert again == []
