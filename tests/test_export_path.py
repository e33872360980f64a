"""The way of an export stays as short as it is: files and functions, counted as for a request."""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

from cloze.export.load.checkpoint import load_checkpoint
from cloze.export.publish import export
from cloze.model_store import Store
from tests.request_path import project_function

CHECKOUT = Path(__file__).resolve().parents[1]

MOST_FILES, MOST_FUNCTIONS = 32, 248
"""A few more functions than were counted. Lower both with the count."""


def test_the_way_of_an_export(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Of a sentence-transformers folder with a pooler, in fp32; importing does not count."""
    source = tmp_path / "source"
    load_checkpoint(str(checkpoints["bert-plain"]))  # imports the families
    encoder = Transformer(str(checkpoints["bert-plain"]))
    modules = [encoder, Pooling(encoder.get_embedding_dimension()), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(source))
    codes: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        export(str(source), "counted", Store(tmp_path / "store"))
    finally:
        sys.setprofile(before)
    called = {one for code in codes if (one := project_function(code, CHECKOUT))}
    files = {one.file for one in called}
    assert {
        "export/load/sentence_transformers.py",
        "export/check/verify.py",
        "model_store/store.py",
    } <= files
    assert not any(file.startswith("export/train/") for file in files)
    assert len(files) <= MOST_FILES, sorted(files)
    assert len(called) <= MOST_FUNCTIONS
