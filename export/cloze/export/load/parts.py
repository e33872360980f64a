"""Reads the heads whose weights lie outside the tensors that families name.

Late interaction has three layouts of files: PyLate's, which is a folder of sentence-transformers;
that of Stanford's ColBERT; and BGE-M3's, which has lexical weights too.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.errors import ExportError
from cloze.export.heads.embedding import Projection
from cloze.export.heads.multi_vector import LexicalHead, MultiVectorHead
from cloze.export.load.sentence_transformers import (
    MODULE_SETTINGS,
    SentenceTransformersFolder,
    read_projection,
)
from cloze.export.load.source import read_settings, read_tensors
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.model_store.error_lines import first_problem
from cloze.model_store.heads.lexical import LexicalOptions
from cloze.model_store.heads.multi_vector import LateInteraction

STANFORD_FILE, STANFORD_CLASS = "artifact.metadata", "HF_ColBERT"
BGE_FILE, LEXICAL_FILE = "colbert_linear.pt", "sparse_linear.pt"
_STANFORD_TENSOR = "linear.weight"
_LEAST_TOKENS = 3
_SPECIAL = ("cls_token", "sep_token", "pad_token", "unk_token")


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """What is read of a checkpoint for a head whose weights are not among the family's tensors.

    Attributes:
        settings: ``config.json`` of the encoder.
        tensors: the tensors of the encoder's files. A head takes out those that it reads.
    """

    folder: SentenceTransformersFolder
    settings: Mapping[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: CheckpointTokenizer
    config: EncoderConfig


def read_pylate(files: HeadFiles) -> MultiVectorHead:
    """Read a directory of PyLate; see its ``ColBERT``."""
    modules = files.folder.projections_of_tokens
    steps = [read_projection(module, of_tokens=True) for module in modules]
    if files.folder.of_encoder.lowercase and not files.tokenizer.lowercase:
        raise ExportError(
            "a model of late interaction whose texts are lower-cased before a cased tokenizer "
            "(do_lower_case) is not supported"
        )
    settings = files.folder.settings
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or any(prompts.values()):
        raise ExportError(
            f"{MODULE_SETTINGS}: prompts beside the markers of a model of late interaction are not "
            "supported; its queries and documents have markers"
        )
    get = partial(_setting, settings)
    tokenizer = files.tokenizer
    words = get("skiplist_words", list(string.punctuation))
    options = {
        "query_marker": _marker(tokenizer, get("query_prefix", "[Q] ")),
        "document_marker": _marker(tokenizer, get("document_prefix", "[D] ")),
        "query_tokens": get("query_length", 32),
        "document_tokens": get("document_length", 180),
        "filling": _mask(tokenizer) if get("do_query_expansion", True) else None,
        "attends_to_filling": get("attend_to_expansion_tokens", False),
        "skipped_ids": _word_ids(tokenizer, words),
    }
    return _head(files, steps, options)


def read_stanford(files: HeadFiles) -> MultiVectorHead:
    """Read a checkpoint of stanford-futuredata/ColBERT; see its ``ColBERTConfig``."""
    weight = files.tensors.pop(_STANFORD_TENSOR, None)
    if weight is None:
        raise ExportError(f"the checkpoint of a ColBERT lacks {_STANFORD_TENSOR}")
    settings = read_settings(files.folder.path / STANFORD_FILE)
    get = partial(_setting, settings)
    if (similarity := get("similarity", "cosine")) != "cosine":
        raise ExportError(f"{STANFORD_FILE}: similarity {similarity!r} is not supported (cosine)")
    backend = files.tokenizer.tokenizer
    marks = string.punctuation if get("mask_punctuation", True) else ""
    pieces = [backend.encode(mark, add_special_tokens=False).ids[:1] for mark in marks]
    options = {
        "query_marker": _marker(files.tokenizer, get("query_token_id", "[unused0]")),
        "document_marker": _marker(files.tokenizer, get("doc_token_id", "[unused1]")),
        "query_tokens": get("query_maxlen", 32),
        "document_tokens": get("doc_maxlen", 220),
        "filling": _mask(files.tokenizer),
        "attends_to_filling": get("attend_to_mask_tokens", False),
        "skipped_ids": {number for piece in pieces for number in piece},
    }
    return _head(files, [Projection(weight, None)], options)


def read_bge(files: HeadFiles) -> MultiVectorHead:
    """Read the layer beside a BGE-M3; see FlagEmbedding's ``EncoderOnlyEmbedderM3Model``."""
    weight, bias = _read_linear(files, BGE_FILE)
    positions = files.config.max_positions
    options = {
        "query_tokens": positions,
        "document_tokens": positions,
        "skips_first": True,
        "averages": True,
    }
    return _head(files, [Projection(weight, bias)], options)


def _read_linear(files: HeadFiles, name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a linear layer that lies in a file of its own."""
    tensors = read_tensors([files.folder.path / name])
    if tensors.keys() != {"weight", "bias"}:
        raise ExportError(f"{name} is not one linear layer ({', '.join(sorted(tensors))})")
    return tensors["weight"], tensors["bias"]


def _setting(settings: Mapping[str, Any], name: str, default: Any) -> Any:
    value = settings.get(name)
    return default if value is None else value


def _marker(tokenizer: CheckpointTokenizer, token: object) -> int | None:
    if token == "":
        return None
    number = tokenizer.tokenizer.token_to_id(token) if isinstance(token, str) else None
    if number is None:
        raise ExportError(
            f"the tokenizer has no token {token!r}, which marks the queries or documents of this "
            "model; save the tokenizer after the marker is added"
        )
    return number


def _mask(tokenizer: CheckpointTokenizer) -> int:
    if tokenizer.mask_id is None:
        raise ExportError("queries are filled with mask tokens, which the tokenizer lacks")
    return tokenizer.mask_id


def _word_ids(tokenizer: CheckpointTokenizer, words: object) -> set[int]:
    """Return the ids of words; one that is no token has the id of the unknown token."""
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ExportError(f"{MODULE_SETTINGS}: skiplist_words must be a list of words")
    find = tokenizer.tokenizer.token_to_id
    unknown = find(tokenizer.special_tokens.get("unk_token", ""))
    ids = [unknown if (number := find(word)) is None else number for word in words]
    return {number for number in ids if number is not None}


def _head(files: HeadFiles, steps: list[Projection], options: dict[str, Any]) -> MultiVectorHead:
    width = files.config.hidden_size
    for step in steps:
        _check_linear(step, width)
        width = step.dimensions
    longest = files.config.max_positions
    skipped = tuple(sorted(options.pop("skipped_ids", ())))
    lengths = {key: options.pop(key) for key in ("query_tokens", "document_tokens")}
    for key, tokens in lengths.items():
        if not isinstance(tokens, int) or tokens <= _LEAST_TOKENS:
            raise ExportError(f"{key.replace('_', ' ')} must be more than 3, got {tokens!r}")
    try:
        section = LateInteraction(
            dimensions=width,
            skipped_ids=skipped,
            **{key: min(tokens, longest) for key, tokens in lengths.items()},
            **options,
        )
    except ValidationError as error:
        raise ExportError(f"late interaction: {first_problem(error)}") from None
    return MultiVectorHead(steps, section)


def _check_linear(step: Projection, width: int) -> None:
    """Raise if a layer does not take vectors of a width, or its numbers are not finite."""
    shape = list(step.linear.weight.shape)
    if len(shape) != 2 or shape[1] != width or step.linear.bias.shape != (shape[0],):
        raise ExportError(
            f"the layer of late interaction has shape {shape}, but its input has {width} numbers"
        )
    if not all(parameter.isfinite().all() for parameter in step.parameters()):
        raise ExportError("the layer of late interaction holds NaN or infinity")


def read_lexical(files: HeadFiles) -> LexicalHead:
    """Read the layer of lexical weights beside a BGE-M3."""
    weight, bias = _read_linear(files, LEXICAL_FILE)
    if weight.shape != (1, files.config.hidden_size) or bias.shape != (1,):
        raise ExportError(
            f"{LEXICAL_FILE} has shape {list(weight.shape)}, not [1, {files.config.hidden_size}]"
        )
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise ExportError(f"{LEXICAL_FILE} holds NaN or infinity")
    names = [files.tokenizer.special_tokens.get(key, "") for key in _SPECIAL]
    ids = {files.tokenizer.tokenizer.token_to_id(name) for name in names} - {None}
    return LexicalHead(weight, bias, LexicalOptions(skipped_ids=tuple(sorted(ids))))
