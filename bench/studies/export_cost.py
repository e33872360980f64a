"""How long does the export of a BERT-large take, and how much memory?

    python bench/studies/export_cost.py FOLDER [--precision int8] [--code CHECKOUT]

The checkpoint has random weights of the real shapes, with the heads of fill-mask and next sentence.
FOLDER keeps it for the next call. ``--code`` measures another checkout of the project.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from cloze.bench.sizes import SIZES, random_tokenizer
from cloze.export.heads import MASKED_LM, NEXT_SENTENCE
from cloze.export.model import Model
from cloze.export.tokenizer import describe_tokenizer
from cloze.export.train.save import save_checkpoint

SIZE = "bert-large"
_SAMPLE_S = 0.05
ROOT = Path(__file__).parents[2]


def make_checkpoint(folder: Path) -> Path:
    """Write the checkpoint unless it is there."""
    checkpoint = folder / SIZE
    if not (checkpoint / "config.json").is_file():
        torch.manual_seed(0)
        config = SIZES[SIZE]
        model = Model(config, [MASKED_LM, NEXT_SENTENCE])
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        tokenizer = describe_tokenizer(random_tokenizer(config.vocab_size))
        save_checkpoint(model, tokenizer, checkpoint)
    return checkpoint


def largest_memory(process: subprocess.Popen[bytes]) -> float:
    """Return the most anonymous memory of a process until it ends, in MB.

    Pages of mapped files, such as the checkpoint's, are left out: the kernel drops them at will.
    """
    largest = 0.0
    while process.poll() is None:
        with suppress(OSError):  # the process has just ended
            status = Path(f"/proc/{process.pid}/status").read_text()
            if found := re.search(r"RssAnon:\s+(\d+) kB", status):
                largest = max(largest, int(found[1]) / 1000)
        time.sleep(_SAMPLE_S)
    return largest


def main() -> None:
    """Export once, and print seconds and the largest memory of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=["int8"])
    parser.add_argument("--code", type=Path, default=ROOT)
    given = parser.parse_args()
    checkpoint = make_checkpoint(given.folder)
    size = (checkpoint / "model.safetensors").stat().st_size
    with tempfile.TemporaryDirectory(dir=given.folder) as store:
        command = [sys.executable, "-m", "cloze", "export", str(checkpoint), "--name", "large"]
        command += ["--model-store", store]
        command += ["--precision", given.precision] if given.precision else []
        environment = {**os.environ, "PYTHONPATH": str(given.code)}
        start = time.perf_counter()
        with subprocess.Popen(command, env=environment) as export:
            peak_mb = largest_memory(export)
        if export.returncode:
            sys.exit(export.returncode)
        seconds = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_s = used.ru_utime + used.ru_stime
    print(
        f"{size / 1e6:,.0f} MB of weights: {seconds:.0f} s, {processor_s:.0f} s of processor time, "
        f"at most {peak_mb:,.0f} MB beside mapped files"
    )


if __name__ == "__main__":
    main()
