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
from tests.support.task_model import manifest

MAX_LINE = 600
_TASKS = ("fill-mask", "embed", "text-classification")
_LABELS = {"labels": ["a", "b"], "problem_type": "regression"}
_MADE = manifest(version=1, tasks=_TASKS, heads={"sequence_classification": _LABELS}).model_dump(
    mode="json"
)
_MADE["embedding"]["default_prompt"] = "query"
BODY: dict[str, Any] = _MADE | {
    "int8": {
        "graph": _MADE["graph"] | {"precision": "int8", "weights": "int8"},
        "parity": _MADE["parity"],
        "gate": {"measured": {"top1": 0.99}, "limits": {"top1": 0.9}},
    },
}


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
