"""Writes a trained model as a Hugging Face checkpoint, which `export.checkpoint` and transformers read alike."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import Tokenizer, normalizers

from export.heads import EXPORT_HEADS, MASKED_LM, NEXT_SENTENCE, SPAN, tensor_names
from export.models import FAMILIES, EncoderConfig, Model
from export.sentence import POOLING_FLAGS, EmbeddingRecipe
from export.train.vocabulary import save_vocabulary

_ARCHITECTURES = {
    ("bert", frozenset({MASKED_LM, NEXT_SENTENCE})): "BertForPreTraining",
    ("bert", frozenset({MASKED_LM})): "BertForMaskedLM",
    ("bert", frozenset({NEXT_SENTENCE})): "BertForNextSentencePrediction",
    ("bert", frozenset({SPAN})): "BertForQuestionAnswering",
    ("distilbert", frozenset({MASKED_LM})): "DistilBertForMaskedLM",
    ("distilbert", frozenset({SPAN})): "DistilBertForQuestionAnswering",
}


def save_checkpoint(
    model: Model, tokenizer: Tokenizer, folder: Path, *, embedding: EmbeddingRecipe | None = None
) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Args:
        model: tied weights are written once.
        tokenizer: its vocabulary has as many tokens as the model has rows.
        folder: where; files of the same names are replaced.
        embedding: if given, the checkpoint is a sentence-transformer too; without dense layers after pooling.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family, config = FAMILIES[model.config.family], model.config
    names = tensor_names(family)
    heads = frozenset(head for head in EXPORT_HEADS if getattr(model, head, None) is not None)
    architecture = _ARCHITECTURES.get(
        (family.name, heads), "BertModel" if family.name == "bert" else "DistilBertModel"
    )
    _write_json(
        folder / "config.json",
        family.write_config(config) | {"architectures": [architecture], "dtype": "float32"},
    )
    tensors = {
        family.original_name(name, names): p.detach().float().cpu().contiguous()
        for name, p in model.named_parameters()
    }
    # Not `save_file`, which lets nobody but the owner read. A full disk leaves the weights of before.
    new = folder / "model.safetensors.new"
    try:
        new.write_bytes(save(tensors, metadata={"format": "pt"}))
        new.replace(folder / "model.safetensors")
    finally:
        new.unlink(missing_ok=True)
    save_vocabulary(tokenizer, folder)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "BertTokenizer" if family.name == "bert" else "DistilBertTokenizer",
            "model_max_length": config.max_positions,
        }
        | _normaliser_settings(tokenizer.normalizer),
    )
    if embedding is not None:
        _write_sentence_transformer(folder, config, embedding)


def _normaliser_settings(normaliser: normalizers.Normalizer | None) -> dict[str, Any]:
    """What transformers builds its own normaliser from; it overrules ``tokenizer.json``."""
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
    """Write what `export.sentence.read_recipe` and sentence-transformers read alike."""
    assert not embedding.projections, "their weights are no part of a model"
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | (
        {"2_Normalize": "Normalize"} if embedding.normalize else {}
    )
    modules: Iterable[dict[str, Any]] = (
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(kinds.items())
    )
    _write_json(folder / "modules.json", list(modules))
    tokens = min(embedding.max_tokens or config.max_positions, config.max_positions)
    _write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False}
    )
    for path in list(kinds)[1:]:
        (folder / path).mkdir(exist_ok=True)
    flag = next(flag for flag, pooling in POOLING_FLAGS.items() if pooling == embedding.pooling)
    _write_json(
        folder / "1_Pooling/config.json",
        {"word_embedding_dimension": config.hidden_size, flag: True},
    )
    if embedding.prompts:
        prompts = {"prompts": embedding.prompts, "default_prompt_name": embedding.default_prompt}
        _write_json(folder / "config_sentence_transformers.json", prompts)


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
