"""Writes a trained model as a Hugging Face checkpoint, and an adapter as a folder of PEFT.

`cloze.export.checkpoint` can read both, transformers the one, and PEFT the other.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import models, normalizers
from torch import Tensor

from cloze.export.blocks.config import EncoderConfig
from cloze.export.embedding_recipe import POOLING_FLAGS, EmbeddingRecipe
from cloze.export.embedding_steps import Step, UnitLength
from cloze.export.families import FAMILIES
from cloze.export.heads import EXPORT_HEADS
from cloze.export.model import Model
from cloze.export.tokenizer import CheckpointTokenizer
from cloze.export.tokenizer_files import AS_SAVED
from cloze.export.train.vocabulary import save_vocabulary
from cloze.model_store.heads.label_sets import HEAD_SECTIONS
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
    named = [head.architecture for name, head in EXPORT_HEADS.items() if name in heads]
    return family.class_prefix + next(filter(None, named), "Model")


def _written_heads(model: Model) -> frozenset[str]:
    """Return the names of a model's heads whose tensors are among the family's."""
    return frozenset(
        name
        for name, head in EXPORT_HEADS.items()
        if head.read is None and getattr(model, name, None) is not None
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
        if (head := EXPORT_HEADS.get(name.partition(".")[0])) is None or head.read is None
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
