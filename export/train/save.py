"""Writes a trained model as a Hugging Face checkpoint, which `export.checkpoint` and transformers read alike."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save
from tokenizers import Tokenizer, normalizers

from export.models import FAMILIES, Head, Model
from export.train.vocabulary import save_vocabulary

_ARCHITECTURES = {
    ("bert", frozenset({Head.MASKED_LM, Head.NEXT_SENTENCE})): "BertForPreTraining",
    ("bert", frozenset({Head.MASKED_LM})): "BertForMaskedLM",
    ("bert", frozenset({Head.NEXT_SENTENCE})): "BertForNextSentencePrediction",
    ("bert", frozenset({Head.SPAN})): "BertForQuestionAnswering",
    ("distilbert", frozenset({Head.MASKED_LM})): "DistilBertForMaskedLM",
    ("distilbert", frozenset({Head.SPAN})): "DistilBertForQuestionAnswering",
}


def save_checkpoint(model: Model, tokenizer: Tokenizer, folder: Path, *, pooling_tokens: int | None = None) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer's files.

    Args:
        model: tied weights are written once.
        tokenizer: its vocabulary has as many tokens as the model has rows.
        folder: where; files of the same names are replaced.
        pooling_tokens: if given, it is a sentence-transformer too: mean pooling, normalised, tuned for so many tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    family, config = FAMILIES[model.config.family], model.config
    heads = frozenset(head for head in Head if getattr(model, head) is not None)
    architecture = _ARCHITECTURES.get((family.name, heads), "BertModel" if family.name == "bert" else "DistilBertModel")
    _write_json(folder / "config.json", family.write_config(config) | {"architectures": [architecture], "dtype": "float32"})
    tensors = {family.original_name(name): p.detach().float().cpu().contiguous() for name, p in model.named_parameters()}
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
    if pooling_tokens is not None:
        _write_sentence_transformer(folder, config.hidden_size, min(pooling_tokens, config.max_positions))


def _normaliser_settings(normaliser: normalizers.Normalizer | None) -> dict[str, Any]:
    """What transformers builds its own normaliser from; it overrules ``tokenizer.json``."""
    if not isinstance(normaliser, normalizers.BertNormalizer):
        return {}
    return {
        "do_lower_case": normaliser.lowercase,
        "strip_accents": normaliser.strip_accents,
        "tokenize_chinese_chars": normaliser.handle_chinese_chars,
    }


def _write_sentence_transformer(folder: Path, dimensions: int, tokens: int) -> None:
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules: Iterable[dict[str, Any]] = (
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    )
    _write_json(folder / "modules.json", list(modules))
    _write_json(folder / "sentence_bert_config.json", {"max_seq_length": tokens, "do_lower_case": False})
    for path in ("1_Pooling", "2_Normalize"):
        (folder / path).mkdir(exist_ok=True)
    _write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": dimensions, "pooling_mode_mean_tokens": True})


def _write_json(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
