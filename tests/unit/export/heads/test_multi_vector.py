"""Settings that a checkpoint of late interaction leaves out have the defaults of its library."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from cloze.export.load.checkpoint import load_checkpoint
from cloze.model_store.heads.multi_vector import LateInteraction
from tests.support import late_models

PYLATE = dict.fromkeys(
    ("query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens",
     "skiplist_words", "query_prefix", "document_prefix")
)  # fmt: skip
STANFORD = dict.fromkeys(("query_maxlen", "doc_maxlen", "mask_punctuation"))


def with_positions(folder: Path, positions: int) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith("position_embeddings.weight")]
    tensors[name] = torch.zeros(positions, tensors[name].shape[1])
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return folder


def read(folder: Path) -> tuple[Any, LateInteraction]:
    loaded = load_checkpoint(str(folder))
    options = loaded.options["multi_vector"]
    assert [head.name for head in loaded.default_heads] == ["multi_vector"]
    return loaded.tokenizer.tokenizer, options


def test_defaults_of_pylate(tmp_path: Path) -> None:
    folder = with_positions(late_models.pylate(tmp_path / "late", **PYLATE), 256)
    tokenizer, options = read(folder)
    assert (options.query_tokens, options.document_tokens) == (32, 180)
    assert options.filling == tokenizer.token_to_id("[MASK]")
    assert not options.attends_to_filling
    assert options.query_marker == tokenizer.token_to_id("[Q] ")
    assert options.document_marker == tokenizer.token_to_id("[D] ")
    unknown = tokenizer.token_to_id("[UNK]")
    ids = {tokenizer.token_to_id(mark) for mark in string.punctuation}
    assert set(options.skipped_ids) == {unknown if one is None else one for one in ids}


def test_defaults_of_stanford(tmp_path: Path) -> None:
    folder = with_positions(late_models.stanford(tmp_path / "late", **STANFORD), 256)
    tokenizer, options = read(folder)
    assert (options.query_tokens, options.document_tokens) == (32, 220)
    assert not options.attends_to_filling
    assert options.skipped_ids
    assert tokenizer.token_to_id(",") in options.skipped_ids
    _, options = read(late_models.stanford(tmp_path / "own", mask_punctuation=False))
    assert not options.skipped_ids


def test_lengths_are_cut_to_the_positions_of_the_encoder(tmp_path: Path) -> None:
    folder = with_positions(late_models.pylate(tmp_path / "late", **PYLATE), 100)
    _, options = read(folder)
    assert (options.query_tokens, options.document_tokens) == (32, 100)
