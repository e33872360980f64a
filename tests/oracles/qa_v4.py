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

SHORT = "Paris is the capital of France. The river Seine runs through the old city, and the king had a green house there."
LONG = " ".join(
    f"In year {year} the king of the {color} house saw {count} people walk from the river to the moon-lit city; they asked who "
    f"had opened door no. {year % 7}, but there was no answer (not from him, nor from her)."
    for year, color, count in zip(
        range(1790, 1806), ["red", "green", "old", "new"] * 4, range(3, 99, 6), strict=True
    )
)
UNICODE = (
    "Café Müller — «naïve» 北京 is a city. Emoji 😀😀 stand here; the ﬁrst answer isn't far. " * 4
)

CASES: list[tuple[str, str, dict[str, object]]] = [
    ("What is the capital of France?", SHORT, {}),
    ("What is the capital of France?", SHORT, {"top_k": 5}),
    ("Who had a house?", SHORT, {"top_k": 4, "align_to_words": False}),
    ("Who had a house?", SHORT, {"max_answer_len": 1, "top_k": 3}),
    ("Who had a house?", SHORT, {"handle_impossible_answer": True, "top_k": 3}),
    ("Who had a house?", SHORT, {"handle_impossible_answer": True, "max_answer_len": 1}),
    ("Who opened the door?", LONG, {}),
    ("Who opened the door?", LONG, {"top_k": 10}),
    ("Who opened the door?", LONG, {"top_k": 3, "doc_stride": 10}),
    (
        "Who opened the door?",
        LONG,
        {"top_k": 3, "max_seq_len": 64, "doc_stride": 32, "max_answer_len": 4},
    ),
    (
        "Who opened the door?",
        LONG,
        {"top_k": 6, "max_seq_len": 100, "doc_stride": 50, "handle_impossible_answer": True},
    ),
    (
        "Who opened the door?",
        LONG,
        {"top_k": 7, "max_seq_len": 80, "doc_stride": 0, "align_to_words": False},
    ),
    ("Where is 北京?", UNICODE, {}),
    ("Where is 北京?", UNICODE, {"top_k": 8, "max_seq_len": 70, "doc_stride": 20}),
    ("A?", "x", {"top_k": 1}),
    ("A?", "two words", {"top_k": 20}),
]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder), "bert-qa")
        pipeline = transformers.pipeline("question-answering", model=folder, device="cpu")
        pipeline.tokenizer.model_max_length = 160
        golden = []
        for question, context, parameters in CASES:
            answers = pipeline(question=question, context=context, **parameters)
            golden.append(
                {
                    "question": question,
                    "context": context,
                    "parameters": parameters,
                    "answers": answers,
                }
            )
    GOLDEN.write_text(
        json.dumps(
            {"transformers": transformers.__version__, "cases": golden},
            indent=1,
            ensure_ascii=False,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
