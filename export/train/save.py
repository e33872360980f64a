"""Writes a trained model as a Hugging Face checkpoint.

Both `cloze.export.checkpoint` and transformers can read the checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import models, normalizers

from cloze.export.blocks.config import EncoderConfig
from cloze.export.families import FAMILIES
from cloze.export.heads import EXPORT_HEADS
from cloze.export.model import Model
from cloze.export.sentence import POOLING_FLAGS, EmbeddingRecipe
from cloze.export.tokenizer import CheckpointTokenizer
from cloze.export.train.vocabulary import save_vocabulary

_AS_SAVED = "PreTrainedTokenizerFast"
"""The class of transformers that reads ``tokenizer.json`` as it is.

Others rebuild the normaliser, the marks and the special tokens of pairs from their own defaults.
"""


def save_checkpoint(
    model: Model,
    tokenizer: CheckpointTokenizer,
    folder: Path,
    *,
    embedding: EmbeddingRecipe | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Args:
        model: trained model. Tied weights are written once.
        tokenizer: tokenizer with as many tokens as the model has word embeddings.
        folder: folder of the checkpoint; files of the same names are replaced.
        embedding: recipe without dense layers, which makes the checkpoint a sentence-transformer;
            None: no sentence-transformer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family, config = FAMILIES[model.config.family], model.config
    _write_json(
        folder / "config.json",
        family.write_config(config)
        | _head_settings(model)
        | {"architectures": [_architecture(model)], "dtype": "float32"},
    )
    _write_weights(model, folder)
    save_vocabulary(tokenizer.tokenizer, folder)
    is_wordpiece = isinstance(tokenizer.tokenizer.model, models.WordPiece)
    tokenizer_config = {
        "tokenizer_class": family.wordpiece.name
        if is_wordpiece and family.wordpiece
        else _AS_SAVED,
        "model_max_length": config.max_positions,
    }
    _write_json(
        folder / "tokenizer_config.json",
        tokenizer_config
        | dict(tokenizer.special_tokens)
        | _normaliser_settings(tokenizer.tokenizer.normalizer),
    )
    if embedding is not None:
        _write_sentence_transformer(folder, config, embedding)


def _architecture(model: Model) -> str:
    """Return the class of transformers that has the model's heads, or else that of its encoder.

    A head whose tensors do not say what it is, such as a classifier, always has its class.
    """
    family = FAMILIES[model.config.family]
    heads = frozenset(head for head in EXPORT_HEADS if getattr(model, head, None) is not None)
    if heads in family.classes:
        return family.classes[heads]
    named = [head.architecture for name, head in EXPORT_HEADS.items() if name in heads]
    return family.class_prefix + next(filter(None, named), "Model")


def _head_settings(model: Model) -> dict[str, Any]:
    """Return the settings of ``config.json`` that describe the heads, such as labels."""
    settings: dict[str, Any] = {}
    for name, options in model.options.items():
        if (write := EXPORT_HEADS[name].write_options) is not None:
            settings |= write(options)
    return settings


def _write_weights(model: Model, folder: Path) -> None:
    """Write ``model.safetensors`` atomically, so that a full disk leaves the previous weights."""
    parameters = {
        name: parameter.detach().float().cpu() for name, parameter in model.named_parameters()
    }
    written = FAMILIES[model.config.family].write(parameters, model.config)
    tensors = {name: tensor.contiguous() for name, tensor in written.items()}
    new_file = folder / "model.safetensors.new"
    try:
        # safetensors' `save_file` would create a file that only its owner can read.
        new_file.write_bytes(save(tensors, metadata={"format": "pt"}))
        new_file.replace(folder / "model.safetensors")
    finally:
        new_file.unlink(missing_ok=True)


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
    """Write the files that `cloze.export.sentence.read_recipe` and sentence-transformers read."""
    assert not embedding.projections, "a model does not hold the weights of dense layers"
    modules = {"": "Transformer", "1_Pooling": "Pooling"}
    if embedding.normalize:
        modules["2_Normalize"] = "Normalize"
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
    _write_json(
        folder / "1_Pooling/config.json", {"word_embedding_dimension": config.hidden_size, **flags}
    )
    if embedding.prompts:
        prompts = {"prompts": embedding.prompts, "default_prompt_name": embedding.default_prompt}
        _write_json(folder / "config_sentence_transformers.json", prompts)


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
