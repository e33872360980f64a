"""Folders of sentence-transformers on tiny encoders, and our embeddings of their exports."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from transformers import BertTokenizerFast, DistilBertTokenizerFast

from cloze.export.publish import export
from cloze.model_store import Store
from cloze.service.core import Device
from cloze.service.engine.onnx_engine import OnnxEngine
from cloze.service.tasks import TaskContext, TaskLimits
from cloze.service.tasks.embed import EmbedParameters, decode, prepare
from cloze.service.text.tokenizer import Tokenizer
from tests.support.tiny import save_checkpoint, save_modernbert

LIMITS = TaskLimits(
    max_tokens=160,
    max_masks=9,
    max_top_k=9,
    max_results=999,
    max_request_tokens=9999,
    max_text_characters=9999,
)


TEXTS = ["the king", "Paris is the capital of France!", "who? " * 20, "moon"]


def saved(folder: Path, kind: str, *after: Any, max_tokens: int = 40, **options: Any) -> Path:
    """Save a sentence-transformer on a tiny encoder the way its users do."""
    if kind == "modernbert":
        checkpoint = save_modernbert(folder / "checkpoint")
    else:
        checkpoint = save_checkpoint(folder / "checkpoint", kind)
        tokenizer = {"bert-plain": BertTokenizerFast, "distilbert": DistilBertTokenizerFast}[kind](
            str(checkpoint / "vocab.txt")
        )
        tokenizer.save_pretrained(checkpoint)
    transformer = Transformer(str(checkpoint), max_seq_length=max_tokens)
    SentenceTransformer(modules=[transformer, *after], device="cpu", **options).save(
        str(folder / "st")
    )
    return folder / "st"


def ours(folder: Path, store: Path, texts: Sequence[str] = TEXTS, **options: Any) -> np.ndarray:
    bundle = export(str(folder), "st", Store(store))
    context = TaskContext(bundle.manifest, Tokenizer(bundle), LIMITS)
    prepared = prepare([*texts], EmbedParameters(**options), context)
    engine = OnnxEngine(bundle, Device.CPU)
    outputs = [engine.run([encoding])[0] for encoding in prepared.encodings]
    return decode(prepared.state, outputs, context)


def edit(folder: Path, file: str, **changes: Any) -> None:
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
