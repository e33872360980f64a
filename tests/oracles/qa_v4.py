"""Writes qa-v4.json: what transformers 4's question-answering pipeline, gone in version 5, says of a tiny random model.

In an environment of its own, from the project's folder:

    pip install torch==2.13.0 'transformers<5'
    python -m tests.oracles.qa_v4
"""

import json
import tempfile
from pathlib import Path

import transformers

from tests.support.tiny import save_checkpoint

GOLDEN = Path(__file__).with_name("qa-v4.json")


def main() -> None:
    """Ask the questions of the file again."""
    cases = json.loads(GOLDEN.read_text())["cases"]
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), "bert-qa")
        pipeline = transformers.pipeline("question-answering", model=folder, device="cpu")
        pipeline.tokenizer.model_max_length = 160
        for case in cases:
            asked = {name: case[name] for name in ("question", "context")}
            case["answers"] = pipeline(**asked, **case["parameters"])
    golden = {"transformers": transformers.__version__, "cases": cases}
    GOLDEN.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
