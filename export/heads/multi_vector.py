"""Multi-vector: what a checkpoint of late interaction says, torch module, graph and gate figure.

Its projection lies outside the encoder, so checkpoints of every family may have the head. Three
layouts of files are read: PyLate's, which is a directory of sentence-transformers; that of
Stanford's ColBERT; and BGE-M3's.
"""

import string
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from cloze.export.errors import ExportError
from cloze.export.evaluation.scorer import Scorer
from cloze.export.evaluation.texts import GateTexts
from cloze.export.graph.trunk import TrunkGraph
from cloze.export.heads.head import (
    ExportHead,
    HeadFiles,
    HeadGraph,
    HeadSetup,
    SampleSizes,
    mean_cosine,
    of_sentences,
    token_rows,
)
from cloze.export.load.embedding_steps import Projection, Step, UnitLength, read_projection
from cloze.export.load.sentence_transformers import (
    late_modules,
    listed_modules,
    sentence_settings,
)
from cloze.export.load.source import read_settings, read_tensors
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.model_store.error_lines import first_problem
from cloze.model_store.heads import multi_vector
from cloze.model_store.heads.multi_vector import LateInteraction, MultiVectorRequest
from cloze.model_store.layouts import Layout, Placement
from cloze.model_store.tensors import INPUT_IDS

_NAME: Final = multi_vector.HEAD.name
_PYLATE_FILE, _STANFORD_FILE = "config_sentence_transformers.json", "artifact.metadata"
_BGE_FILE = "colbert_linear.pt"
_STANFORD_TENSOR, _STANFORD_CLASS = "linear.weight", "HF_ColBERT"
_LEAST_TOKENS = 3
_STD = 0.02
"""Standard deviation of new weights, as in all heads (Devlin et al. 2019)."""


class MultiVectorHead(nn.Module):
    """Projects each token, and scales its vector to length 1.

    Args:
        steps: the dense layers, of which the first has the encoder's hidden states.
        options: the head's section of the manifest.
    """

    def __init__(self, steps: Iterable[Step], options: LateInteraction) -> None:
        super().__init__()
        self.steps = nn.ModuleList([*steps, UnitLength()])
        self.options = options

    def forward(self, rows: Tensor) -> Tensor:
        """Return the vectors [V, D] of ``rows`` [V, H]."""
        for step in self.steps:
            rows = step(rows)
        return rows


def _make(setup: HeadSetup) -> MultiVectorHead:
    """Return a new head with random weights."""
    options = setup.options
    assert isinstance(options, LateInteraction)
    weight = torch.empty(options.dimensions, setup.config.hidden_size).normal_(std=_STD)
    return MultiVectorHead([Projection(weight, None)], options)


# ---- checkpoints ---------------------------------------------------------------------------------


def _read(files: HeadFiles) -> MultiVectorHead | None:
    """Return the head of a checkpoint; None if it has none.

    Raises:
        ExportError: a setting or a tensor is missing, or is not supported.
    """
    dense = late_modules(listed_modules(files.folder))
    architectures = files.settings.get("architectures") or []
    if dense:
        return _read_pylate(files, [path for _, path in dense])
    if (files.folder / _STANFORD_FILE).is_file() or _STANFORD_CLASS in architectures:
        return _read_stanford(files)
    if (files.folder / _BGE_FILE).is_file():
        return _read_bge(files)
    return None


def _read_pylate(files: HeadFiles, folders: Sequence[str]) -> MultiVectorHead:
    """Read a directory of PyLate; see its ``ColBERT``."""
    steps = [
        read_projection(
            files.folder / path, read_settings(files.folder / path / "config.json"), of_tokens=True
        )
        for path in folders
    ]
    if sentence_settings(files.folder).lowercase and not files.tokenizer.lowercase:
        raise ExportError(
            "a model of late interaction whose texts are lower-cased before a cased tokenizer "
            "(do_lower_case) is not supported"
        )
    settings = read_settings(files.folder / _PYLATE_FILE)
    prompts = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or any(prompts.values()):
        raise ExportError(
            f"{_PYLATE_FILE}: prompts beside the markers of a model of late interaction are not "
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


def _read_stanford(files: HeadFiles) -> MultiVectorHead:
    """Read a checkpoint of stanford-futuredata/ColBERT; see its ``ColBERTConfig``."""
    weight = files.tensors.pop(_STANFORD_TENSOR, None)
    if weight is None:
        raise ExportError(f"the checkpoint of a ColBERT lacks {_STANFORD_TENSOR}")
    settings = read_settings(files.folder / _STANFORD_FILE)
    get = partial(_setting, settings)
    if (similarity := get("similarity", "cosine")) != "cosine":
        raise ExportError(f"{_STANFORD_FILE}: similarity {similarity!r} is not supported (cosine)")
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


def _read_bge(files: HeadFiles) -> MultiVectorHead:
    """Read the layer beside a BGE-M3; see FlagEmbedding's ``EncoderOnlyEmbedderM3Model``."""
    weight, bias = read_linear(files, _BGE_FILE)
    positions = files.config.max_positions
    options = {
        "query_tokens": positions,
        "document_tokens": positions,
        "skips_first": True,
        "averages": True,
    }
    return _head(files, [Projection(weight, bias)], options)


def read_linear(files: HeadFiles, name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of a linear layer that lies in a file of its own.

    Raises:
        ExportError: the file holds anything else.
    """
    tensors = read_tensors([files.folder / name])
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
        raise ExportError(f"{_PYLATE_FILE}: skiplist_words must be a list of words")
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


# ---- graph ---------------------------------------------------------------------------------------


def _write_keys(head: MultiVectorHead, trunk: TrunkGraph) -> None:
    """Write the number of tokens of each sequence to which tokens attend, [B]."""
    if trunk.layout is Layout.PACKED:
        if head.options.has_unattended:
            raise ExportError(
                "queries filled with tokens to which no token attends have no fp16 graph: the "
                "variable-length kernel has no mask; leave out --precision fp16"
            )
        return
    g = trunk.g
    sequences = trunk.declare(multi_vector.KEY_SEQUENCES)
    tokens = trunk.declare(multi_vector.KEY_TOKENS)
    if not head.options.has_unattended:
        return
    batch = g.op("Shape", [INPUT_IDS.name], start=0, end=1)
    length = g.op("Cast", [g.op("Shape", [INPUT_IDS.name], start=1)], to=_INT32)
    all_tokens = g.op("Expand", [length, batch])  # [B]
    trunk.keys = g.op("ScatterElements", [all_tokens, sequences, tokens], axis=0)


_INT32: Final = 6
"""ONNX's number of the type."""


def _write(head: MultiVectorHead, graph: HeadGraph) -> None:
    rows = graph.gather(multi_vector.VECTOR_ROWS)
    for number, step in enumerate(head.steps):
        rows = cast(Step, step).write(graph.g, rows, f"multi_vector.{number}")
    graph.output(rows, multi_vector.MULTI_VECTORS, F=head.options.dimensions)


def _reference(
    head: MultiVectorHead, states: Tensor, requests: Sequence[Any], placement: Placement
) -> dict[str, Tensor]:
    rows: Tensor = head(states[-1][token_rows(requests, placement)])
    return {multi_vector.MULTI_VECTORS.name: rows}


def _sample(rng: np.random.Generator, sizes: SampleSizes) -> MultiVectorRequest:
    options = sizes.options.get(_NAME)
    if not isinstance(options, LateInteraction) or not options.has_unattended:
        return MultiVectorRequest()
    return MultiVectorRequest(int(rng.integers(2, sizes.tokens, endpoint=True)))


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the mean cosine of both models' vectors, token by token."""
    pairs = of_sentences((checkpoint, graph), _NAME, texts, MultiVectorRequest())
    return {"multi_vector_cosine_mean": mean_cosine(pairs)}


EXPORT_HEAD: Final = ExportHead(
    head=multi_vector.HEAD,
    module=_make,
    read=_read,
    write_keys=_write_keys,
    write=_write,
    reference=_reference,
    sample=_sample,
    measure=_measure,
    limits={"multi_vector_cosine_mean": 0.98},
    fine_tuned=True,
)
