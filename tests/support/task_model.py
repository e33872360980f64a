"""A model without weights: its tokenizer, its manifest and limits, and outputs by hand."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cloze.model_store import Bundle, Manifest
from cloze.model_store.heads import HEADS, ArrayResult
from cloze.service.tasks import TASKS
from cloze.service.tasks.task import PreparedRequest, TaskContext, TaskLimits
from cloze.service.text.tokenizer import Tokenizer
from tests.support.vocabulary import vocabulary

VOCABULARY = vocabulary()
ID = {token: number for number, token in enumerate(VOCABULARY)}
CLS, SEP, MASK, UNK = ID["[CLS]"], ID["[SEP]"], ID["[MASK]"], ID["[UNK]"]

ENTITIES = {"kind": "span", "max_width": 2, "max_len": 8, "ent_id": 5, "sep_id": 6}
LABELS = ("O", "B-PER", "I-PER", "LOC")
EMBEDDING = {
    "dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 10, "projected": False,
}  # fmt: skip
LATE: dict[str, Any] = {
    "dimensions": 2, "query_marker": ID["?"], "document_marker": ID["!"], "query_tokens": 7,
    "document_tokens": 8, "filling": MASK, "skipped_ids": [ID["."], ID[","]],
}  # fmt: skip
"""Options of a model of late interaction."""

LIMITS = TaskLimits(
    max_tokens=12,
    max_masks=3,
    max_top_k=50,
    max_results=60,
    max_request_tokens=400,
    max_text_characters=200,
    max_request_texts=4,
)


def ids(text: str) -> list[int]:
    """Return the ids of tokens that stand between spaces."""
    return [ID[token] for token in text.split()]


def manifest(**changes: Any) -> Manifest:
    """Return the manifest of a model of every task.

    Two heads are left out, which answer `/embed_all` and `/embed_sparse` in place of others.
    """
    tasks = [head.task for head in HEADS.values() if head.name not in ("multi_vector", "lexical")]
    stored = {"size": 1, "sha256": "0" * 64}
    fields: dict[str, Any] = {
        "name": "tiny",
        "version": 3,
        "created": "2026-01-01T00:00:00Z",
        "tasks": tasks,
        "architecture": {
            "family": "bert", "vocab_size": len(VOCABULARY), "hidden_size": 4, "layers": 4, "heads": 1,
            "max_positions": 16, "type_vocab_size": 2, "parameters": 100,
        },
        "source": {"kind": "directory", "location": "x", "revision": None, "weights_sha256": "0" * 64},
        "license": None,
        "tokenizer": {
            "file": "tokenizer.json", "vocab_size": len(VOCABULARY), "lowercase": True, "cls_id": CLS,
            "sep_id": SEP, "mask_id": MASK, "mask_token": "[MASK]",
        },
        "limits": {"max_tokens": 12},
        "embedding": EMBEDDING | {
            "prompts": {"query": "ask : ", "long": "the first of the year is in the old house"},
        },
        "heads": {
            "sequence_classification": {"labels": LABELS, "problem_type": "single_label_classification"},
            "token_classification": {"labels": LABELS},
        },
        "graph": {"file": "g.onnx", "layout": "dense", "precision": "fp32", "opset": 20, "operators": {"MatMul": 6}},
        "parity": {"tolerance": 1e-4, "batches": [1], "lengths": [3], "max_error": {"embeddings": 1e-6}, "golden_file": "golden.json"},
        "files": dict.fromkeys(("tokenizer.json", "g.onnx", "golden.json"), stored),
    } | changes  # fmt: skip
    if "entities" in fields["tasks"]:
        fields["heads"] = {"entities": ENTITIES} | fields["heads"]
    return Manifest.model_validate(fields)


def classifier(*labels: str, **options: Any) -> dict[str, Any]:
    """Return the heads of a model with these labels of texts."""
    problem = {"problem_type": "single_label_classification"}
    return {
        "sequence_classification": {"labels": labels} | problem | options,
        "token_classification": {"labels": LABELS},
    }


def bundle(folder: Path, **changes: Any) -> Bundle:
    """Return the model as a bundle in a folder; `changes` replace fields of the manifest."""
    backend = Backend(
        models.WordPiece(dict(ID.items()), unk_token="[UNK]", max_input_chars_per_word=100)
    )
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]", "[SEP]", "[MASK]"])
    backend.save(str(folder / "tokenizer.json"))
    return Bundle(manifest(**changes), folder)


def context(limits: TaskLimits = LIMITS, /, **changes: Any) -> TaskContext:
    """Return the context of a call; `changes` replace fields of the manifest."""
    with TemporaryDirectory() as folder:
        described = bundle(Path(folder), **changes)
        return TaskContext(described.manifest, Tokenizer(described), limits)


CONTEXT = context()


def limited(**changes: int) -> TaskContext:
    """Return the context with other limits."""
    return replace(CONTEXT, limits=replace(LIMITS, **changes))


def prepared(
    task: str, inputs: Any, with_context: TaskContext = CONTEXT, /, **parameters: Any
) -> PreparedRequest[Any]:
    """Return a call of a task, prepared."""
    made = TASKS[task].parameters.model_validate(parameters)
    return TASKS[task].prepare(inputs, made, with_context)


def outputs(head: str, *rows: Any) -> list[Any]:
    """Return what a head gives each encoding."""
    return [{head: ArrayResult(np.array(row, np.float32))} for row in rows]


def decoded(
    task: str,
    request: PreparedRequest[Any],
    outputs: list[Any],
    with_context: TaskContext = CONTEXT,
) -> Any:
    """Return the results of a prepared call."""
    return TASKS[task].decode(request.state, outputs, with_context)


def tokens(request: PreparedRequest[Any]) -> list[str]:
    """Return the tokens of each encoding."""
    return [" ".join(VOCABULARY[i] for i in e.input_ids.tolist()) for e in request.encodings]
