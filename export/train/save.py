"""Writes a trained model as a Hugging Face checkpoint, and an adapter as a folder of PEFT.

`cloze.export.load.checkpoint` can read both, transformers the one, and PEFT the other.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save
from tokenizers import models, normalizers
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.families import FAMILIES
from cloze.export.heads import EXPORT_HEADS
from cloze.export.heads.embedding import EmbeddingRecipe
from cloze.export.heads.embedding_steps import Step, UnitLength
from cloze.export.load.checkpoint import Checkpoint
from cloze.export.load.sentence_transformers import POOLING_FLAGS, encoder_folder
from cloze.export.load.source import read_settings
from cloze.export.load.tokenizer import CheckpointTokenizer
from cloze.export.load.tokenizer_files import AS_SAVED
from cloze.export.model import Model
from cloze.export.train.low_rank import LowRankLinear, low_rank_matrices
from cloze.export.train.vocabulary import save_vocabulary
from cloze.model_store.heads.label_sets import HEAD_SECTIONS
from cloze.model_store.peft import (
    CONFIG_FILE,
    ENCODER_DIGEST,
    LABELS_FILE,
    NAME_PREFIX,
    TENSORS_FILE,
)
from cloze.model_store.plain_files import replacing


def save_checkpoint(
    model: Model,
    tokenizer: CheckpointTokenizer,
    folder: Path,
    *,
    embedding: EmbeddingRecipe | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Args:
        folder: folder of the checkpoint; files of the same names are replaced.
        embedding: recipe that makes the checkpoint a sentence-transformer; None: it is none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, heads = model.config, _written_heads(model)
    settings = FAMILIES[config.family].write_config(config)
    settings |= _head_settings(model.options)
    settings |= {"architectures": [_architecture(config, heads)], "dtype": "float32"}
    _write_json(folder / "config.json", settings)
    _write_weights(model, folder)
    _write_tokenizer(model, tokenizer, folder)
    if embedding is not None:
        _write_sentence_transformer(folder, model.config, embedding)


def save_adapter(
    model: Model,
    base: Checkpoint,
    folder: Path,
    *,
    heads: Collection[str],
    embedding: EmbeddingRecipe | None = None,
) -> None:
    """Write a folder that PEFT reads: low-rank matrices and heads, without the encoder of the base.

    ``config.json`` has the labels of the head; PEFT does not read the file. Without a head there is
    none, so that transformers and sentence-transformers read the folder as an adapter.

    Args:
        base: the checkpoint whose encoder the model has.
        folder: folder of the adapter; files of the same names are replaced.
        heads: names of the heads that are written; with several, PEFT reads the first.
        embedding: recipe of embeddings of a run that changed them; None: the base's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family, config = FAMILIES[model.config.family], model.config
    heads = [name for name in EXPORT_HEADS if name in heads]
    # The class of an encoder without a head has no prefix before its names.
    prefix = family.prefix if heads else ""
    tensors = {
        f"{prefix}{path}.lora_{letter}.weight": matrix
        for path, pair in low_rank_matrices(model).items()
        for letter, matrix in zip("AB", pair, strict=True)
    }
    targets = _suffixes({name.split(".lora_")[0] for name in tensors}, _modules(model, prefix))
    own = {n: p for n, p in model.named_parameters() if n.partition(".")[0] in heads}
    head_tensors = family.write(own, config, of_modules=True)
    saved = sorted({_whole_module(name, family.prefix) for name in head_tensors})
    lora = next((one for one in model.modules() if isinstance(one, LowRankLinear)), None)
    is_hub = base.source.kind == "hub"
    adapter = {
        "peft_type": "LORA",
        "task_type": TASK_TYPES[heads[0]] if heads else "FEATURE_EXTRACTION",
        "base_model_name_or_path": base.source.location if is_hub else str(base.folder.resolve()),
        "revision": base.source.revision,
        "r": 1 if lora is None else len(lora.lora_a),
        "lora_alpha": 1 if lora is None else lora.scale * len(lora.lora_a),
        "target_modules": targets or _NO_TARGETS,
        "modules_to_save": saved or None,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "inference_mode": True,
    }
    _write_json(folder / CONFIG_FILE, adapter)
    (folder / LABELS_FILE).unlink(missing_ok=True)
    if heads:
        settings = {
            name: value
            for name, value in read_settings(encoder_folder(base.folder) / "config.json").items()
            if name not in _OF_LABELS
        }
        settings |= _head_settings({n: one for n, one in model.options.items() if n in heads})
        settings["architectures"] = [_architecture(config, frozenset(heads))]
        _write_json(folder / LABELS_FILE, settings)
    prefixed = {f"{NAME_PREFIX}{name}": one for name, one in (tensors | head_tensors).items()}
    digest = base.source.encoder_sha256
    metadata = {} if digest is None else {ENCODER_DIGEST: digest}
    _write_tensors(prefixed, folder / TENSORS_FILE, metadata)
    if embedding is not None:
        _write_tokenizer(model, base.tokenizer, folder)
        _write_sentence_transformer(folder, config, embedding)


_NO_TARGETS: Final = "dummy-target-modules"
"""PEFT's name of no module, in an adapter that has only heads."""

TASK_TYPES: Final = {
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "span": "QUESTION_ANS",
}
"""PEFT's names of tasks, by the name of the head; without such a head, it is its encoder's."""


_OF_LABELS: Final = {"id2label", "label2id", "num_labels", "problem_type", HEAD_SECTIONS}
"""Settings of ``config.json`` that describe the labels of a checkpoint."""


def _whole_module(tensor: str, prefix: str) -> str:
    """Return the name of the outermost module that only has tensors of a head.

    For example ``classifier`` of ``classifier.dense.weight``, ``pooler`` of
    ``bert.pooler.dense.weight``.
    """
    return tensor.removeprefix(prefix).partition(".")[0]


def _modules(model: Model, prefix: str) -> set[str]:
    """Return the names of transformers' modules of the encoder, and of all heads of the family."""
    family = FAMILIES[model.config.family]
    own = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith("encoder.") and ".lora_" not in name
    }
    written = family.write(own, model.config, of_modules=True)
    names = {prefix + name.removeprefix(family.prefix) for name in written}
    names |= {name for spec in family.heads.values() for name in spec.tensors}
    modules: set[str] = set()
    for name in names:
        parts = name.split(".")[:-1]
        modules |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return modules


def _suffixes(paths: set[str], modules: set[str]) -> list[str]:
    """Return the shortest ends of some modules' names that no other module's name has."""
    suffixes = set()
    for path in paths:
        parts = path.split(".")
        ends = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        others = [f".{other}" for other in modules - paths]
        suffixes.add(next(e for e in ends if not any(o.endswith(f".{e}") for o in others)))
    return sorted(suffixes)


def _write_tokenizer(model: Model, tokenizer: CheckpointTokenizer, folder: Path) -> None:
    family, config = FAMILIES[model.config.family], model.config
    save_vocabulary(tokenizer.tokenizer, folder)
    is_wordpiece = isinstance(tokenizer.tokenizer.model, models.WordPiece)
    tokenizer_config = {
        "tokenizer_class": family.wordpiece.name if is_wordpiece and family.wordpiece else AS_SAVED,
        "model_max_length": config.max_positions,
        "truncation_side": tokenizer.truncation_side,
    }
    if config.type_vocab_size > 1 and not tokenizer.special.second_type:
        tokenizer_config["model_input_names"] = ["input_ids", "attention_mask"]
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_config
        | dict(tokenizer.special_tokens)
        | _normaliser_settings(tokenizer.tokenizer.normalizer),
    )


def _architecture(config: EncoderConfig, heads: frozenset[str]) -> str:
    """Return the class of transformers that has these heads, or else that of the encoder.

    A head whose tensors do not say what it is, such as a classifier, always has its class.
    """
    family = FAMILIES[config.family]
    if heads in family.classes:
        return family.classes[heads]
    named = [h.classes[0] for name, h in EXPORT_HEADS.items() if name in heads and h.needs_class]
    return family.class_prefix + next(iter(named), "Model")


def _written_heads(model: Model) -> frozenset[str]:
    """Return the names of a model's heads whose tensors are among the family's."""
    return frozenset(
        name
        for name, head in EXPORT_HEADS.items()
        if head.of_family and getattr(model, name, None) is not None
    )


def _head_settings(options_by_head: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``config.json`` that describe the heads, such as labels.

    transformers' settings describe one head with one set of labels. With more, they describe the
    first head with all its labels, and a section of our own describes each.
    """
    settings: dict[str, Any] = {}
    for name, options in reversed(options_by_head.items()):
        if (write := EXPORT_HEADS[name].write_options) is not None:
            settings |= write(options)
    has_more = len(settings) and (
        len(options_by_head) > 1
        or any(options.further for options in options_by_head.values())
        or any(each.temperature for options in options_by_head.values() for each in options.sets)
    )
    if has_more:
        settings[HEAD_SECTIONS] = {
            name: options.model_dump(mode="json") for name, options in options_by_head.items()
        }
    return settings


def _write_weights(model: Model, folder: Path) -> None:
    """Write ``model.safetensors`` atomically, so that a full disk leaves the previous weights."""
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if (head := EXPORT_HEADS.get(name.partition(".")[0])) is None or head.of_family
    }
    written = FAMILIES[model.config.family].write(parameters, model.config)
    _write_tensors(written, folder / "model.safetensors")


def _write_tensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    floats = {name: one.detach().float().cpu().contiguous() for name, one in tensors.items()}
    with replacing(file) as new_file:
        # safetensors' `save_file` would create a file that only its owner can read.
        new_file.write_bytes(save(floats, metadata={"format": "pt", **(metadata or {})}))


def _normaliser_settings(normaliser: normalizers.Normalizer | None) -> dict[str, Any]:
    """Return the settings of transformers' normaliser, which overrides ``tokenizer.json``."""
    if not isinstance(normaliser, normalizers.BertNormalizer):
        return {}
    return {
        "do_lower_case": normaliser.lowercase,
        "strip_accents": normaliser.strip_accents,
        "tokenize_chinese_chars": normaliser.handle_chinese_chars,
    }


def _write_sentence_transformer(
    folder: Path, config: EncoderConfig, embedding: EmbeddingRecipe
) -> None:
    """Write the files that `embedding_recipe.read_recipe` and sentence-transformers read."""
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    steps = [*embedding.steps, *([UnitLength()] if embedding.normalize else [])]
    for number, step in enumerate(steps, 2):
        modules[f"{number}_{step.kind}"] = step.kind
        _write_step(step, folder / f"{number}_{step.kind}")
    entries = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(modules.items())
    ]
    _write_json(folder / "modules.json", entries)
    tokens = min(embedding.max_tokens or config.max_positions, config.max_positions)
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False}
    )
    for path in filter(None, modules):
        (folder / path).mkdir(exist_ok=True)
    # All flags: text-embeddings-inference refuses a file that lacks one.
    flags = {flag: pooling == embedding.pooling for flag, pooling in POOLING_FLAGS.items()}
    pooling = {"word_embedding_dimension": config.hidden_size, **flags}
    if not embedding.include_prompt:
        pooling["include_prompt"] = False
    _write_json(folder / "1_Pooling/config.json", pooling)
    if embedding.prompts:
        prompts = {"prompts": embedding.prompts, "default_prompt_name": embedding.default_prompt}
        _write_json(folder / "config_sentence_transformers.json", prompts)


def _write_step(step: Step, folder: Path) -> None:
    """Write the folder of a module after the pooling."""
    folder.mkdir(exist_ok=True)
    settings, tensors = step.saved()
    if tensors:
        _write_json(folder / "config.json", settings)
        _write_tensors(tensors, folder / "model.safetensors")


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
