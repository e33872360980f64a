"""`scripts/train-default` makes the default models from a checkpoint and text, here in two steps
per run, with vectors of 96 numbers, and from a fraction of the text.
"""

import json
import lzma
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig, BertModel

from cloze.model_store import Store
from tests.conftest import minilm_checkpoint
from tests.support.command import call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
NAMES = ["cloze-bert", "cloze-bert-tasks", "cloze-distilbert"]


def copy_some(file: Path, small: Path, change: Callable[[Any], Any]) -> None:
    """Copy what a function makes of the lines of a file, packed or not."""
    opened = lzma.open if file.suffix == ".xz" else open
    small.parent.mkdir(parents=True, exist_ok=True)
    with opened(file, "rt") as lines, opened(small, "wt") as target:
        target.writelines(change(lines))


def some_documents(lines: Iterable[str]) -> Iterator[str]:
    """Yield the first documents of a corpus, and of each only the beginning."""
    for line in islice(lines, 200):
        document = json.loads(line)
        yield json.dumps(document | {"text": document["text"][:8000]}) + "\n"


def some_questions(lines: Iterable[str]) -> list[str]:
    """Return the first ten questions of 40 articles."""
    articles = json.loads("".join(lines))["data"][:40]
    for article in articles:
        article["paragraphs"] = article["paragraphs"][:1]
        article["paragraphs"][0]["qas"] = article["paragraphs"][0]["qas"][:10]
    return [json.dumps({"data": articles})]


def make_small(data: Path, small: Path) -> None:
    """Write a folder like that of the data, with little text."""
    recipe = tomllib.loads((ROOT / "scripts/recipes/finetune-tasks-from-minilm.toml").read_text())
    changes: dict[str, Callable[[Any], Any]] = {
        # Every fifth row, so that no label is missing.
        name: lambda lines: islice(lines, 0, None, 5)
        for task in recipe["task"]
        for name in [*task.get("learnt", ()), *task.get("measured", ())]
    }
    for name in ("crows-pairs", "stsb-en-dev"):
        changes[f"eval/{name}.csv"] = lambda lines: islice(lines, 60)
    for name in ("squad-v1.1", "squad-v2.0", "natural-questions-qed"):
        changes[f"qa/{name}.json.xz"] = some_questions
    changes["corpus/corpus-modern.jsonl.xz"] = some_documents
    for name, change in changes.items():
        copy_some(data / name, small / name, change)


def narrow_checkpoint(folder: Path) -> Path:
    """Write a checkpoint like all-MiniLM-L6-v2 with random weights and a quarter of the width."""
    shutil.copytree(minilm_checkpoint(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = BertConfig.from_pretrained(folder, hidden_size=96, intermediate_size=192)
    BertModel(config).save_pretrained(folder)
    return folder


def test_the_script_makes_every_default_model_and_repeats_no_finished_run(
    external_data: Path, tmp_path: Path
) -> None:
    make_small(external_data, tmp_path / "data")
    binaries, log = tmp_path / "bin", tmp_path / "calls"
    binaries.mkdir()
    for name, arguments in (("cloze", f"-m tests.support.short_cloze {log}"), ("python", "")):
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (binaries / name).chmod(0o755)
    minilm = narrow_checkpoint(tmp_path / "minilm")
    folders = [tmp_path / "data", minilm, tmp_path / "runs", tmp_path / "store"]

    def run() -> list[str]:
        """Run the script, and return the commands of ``cloze train`` that it called."""
        log.unlink(missing_ok=True)
        command = [ROOT / "scripts" / "train-default", binaries, *folders]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        call(*command, env=environment, cwd=ROOT)
        calls = [json.loads(line) for line in log.read_text().splitlines()]
        return [each[1] for each in calls if each[0] == "train" and each[1] != "evaluate"]

    assert run().count("pretrain") == 5
    assert Store(folders[-1]).references() == [f"{name}@1" for name in NAMES]

    # What is not a run is measured and exported again, which would take as long as before.
    only_noted = (
        f"import json, sys; open({str(log)!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    )
    (binaries / "cloze").write_text(f'#!/bin/sh\nexec {sys.executable} -c "{only_noted}" "$@"\n')
    assert run() == []
