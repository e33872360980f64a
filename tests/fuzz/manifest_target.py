"""Manifests of bundles: the store returns a manifest, or refuses it with one line."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from cloze.model_store import Manifest, Store, StoreError
from cloze.model_store.graph_checks import expected_tensors
from cloze.model_store.layouts import Layout
from tests.fuzz.damage import damaged_bytes, damaged_json
from tests.fuzz.search import Target
from tests.support.crafted import sealed

MAX_LINE = 600
GRAPH = {"file": "g.onnx", "layout": "dense", "precision": "fp32", "opset": 20, "operators": {}}
PARITY = {
    "tolerance": 1e-4, "batches": [1], "lengths": [3], "max_error": {"embeddings": 1e-6},
    "golden_file": "golden.json",
}  # fmt: skip
BODY: dict[str, Any] = {
    "name": "tiny",
    "tasks": ["fill-mask", "embed", "text-classification"],
    "architecture": {
        "family": "bert", "vocab_size": 10, "hidden_size": 4, "layers": 1, "heads": 1,
        "intermediate_size": 8, "max_positions": 16, "type_vocab_size": 2, "activation": "gelu",
        "layer_norm_eps": 1e-12, "parameters": 100,
    },
    "source": {"kind": "hub", "location": "x", "revision": None, "weights_sha256": "0" * 64},
    "license": None,
    "tokenizer": {
        "file": "t.json", "vocab_size": 10, "lowercase": True, "cls_id": 1, "sep_id": 2,
        "mask_id": 3, "mask_token": "[MASK]",
    },
    "limits": {"max_tokens": 16},
    "embedding": {
        "dimensions": 4, "pooling": "mean", "normalize": True, "max_tokens": 16,
        "prompts": {"q": "query: "}, "default_prompt": "q", "projected": False,
    },
    "graph": GRAPH,
    "parity": PARITY,
    "gate": None,
    "int8": {
        "graph": GRAPH | {"precision": "int8", "weights": "int8"},
        "parity": PARITY,
        "gate": {"measured": {"top1": 0.99}, "limits": {"top1": 0.9}},
    },
    "fp16": None,
    "heads": {"sequence_classification": {"labels": ["a", "b"], "problem_type": "regression"}},
    "schema_version": 1,
    "version": 1,
    "created": "2026-01-02T03:04:05Z",
    "files": {
        name: {"sha256": "0" * 64, "size": 1} for name in ("t.json", "g.onnx", "golden.json")
    },
}  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw a manifest with a valid digest and up to three damaged values."""
    body = BODY
    for _ in range(draw(st.integers(0, 3))):
        body = draw(damaged_json(body))
    try:
        return sealed(body)
    except UnicodeEncodeError:  # a lone surrogate; as an escape, it stays valid JSON
        return json.dumps(body).encode()


def check(data: bytes, scratch: Path) -> bool:
    """Read a manifest as a server does; return whether the store accepts the manifest."""
    file = scratch / "tiny" / "1" / "manifest.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    try:
        manifest = Store(scratch).manifest("tiny")
    except StoreError as error:
        line = str(error)
        assert line.startswith("the manifest of tiny@1 is refused: "), line
        assert line.isprintable(), line
        assert len(line) < MAX_LINE, line
        return False
    written = manifest.to_bytes()
    assert Manifest.from_bytes(written).to_bytes() == written, "the store cannot read what it wrote"
    for layout in Layout:
        with suppress(ValueError):  # the code that checks a graph expects one
            expected_tensors(manifest, layout)
    return True


TARGET = Target(
    name="manifest",
    valid=[sealed(BODY)],
    inputs=bodies() | damaged_bytes(bodies()),
    check=check,
    examples=300,
)
