"""Tiny random checkpoints of late interaction, in the layouts in which their users save them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaModel

from cloze.export.load.tokenizer import load_tokenizer
from tests.support import tiny
from tests.support.tokenizer_kinds import unigram

DIMENSIONS, POSITIONS = 12, 160


def _random(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _encoder(folder: Path, *tokens: str) -> Path:
    """Save a BERT whose vocabulary ends with ``tokens``."""
    tiny.save_checkpoint(folder, "bert-plain")
    tokenizer = load_tokenizer(folder).tokenizer
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    words = weights["embeddings.word_embeddings.weight"]
    weights["embeddings.word_embeddings.weight"] = torch.cat(
        [words, words[5 : 5 + len(tokens)].flip(1)]
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] += len(tokens)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pylate(folder: Path, **settings: Any) -> Path:
    """Save a directory as PyLate saves one: an encoder and a ``Dense`` without bias."""
    return _add_dense(_encoder(folder, "[Q] ", "[D] "), settings)


def pylate_modernbert(folder: Path, **settings: Any) -> Path:
    """Save a directory of PyLate whose encoder is a ModernBERT."""
    return _add_dense(tiny.save_modernbert(folder, "[Q] ", "[D] "), settings)


def _add_dense(folder: Path, settings: dict[str, Any]) -> Path:
    """Add PyLate's ``Dense`` and settings to the directory of an encoder."""
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    own = {
        "model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ",
        "query_length": 12, "document_length": 20, "attend_to_expansion_tokens": False,
        "skiplist_words": [",", ".", "no such word"], "do_query_expansion": True,
        "prompts": {}, "similarity_fn_name": "MaxSim",
    }  # fmt: skip
    (folder / "config_sentence_transformers.json").write_text(json.dumps(own | settings))
    # PyLate leaves the limit of the longest document, less its marker, in both files.
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 19}')
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 19}))
    dense = {
        "in_features": 64, "out_features": DIMENSIONS, "bias": False, "use_residual": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }  # fmt: skip
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": _random(DIMENSIONS, 64)}, folder / "1_Dense" / "model.safetensors")
    return folder


def stanford(folder: Path, **settings: Any) -> Path:
    """Save a checkpoint as Stanford's ColBERT saves one: ``linear.weight`` beside ``bert.*``."""
    _encoder(folder, "[unused0]", "[unused1]")
    weights = {f"bert.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    weights["linear.weight"] = _random(DIMENSIONS, 64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    own = {"query_maxlen": 10, "doc_maxlen": 24, "dim": DIMENSIONS, "mask_punctuation": True}
    (folder / "artifact.metadata").write_text(json.dumps(own | settings))
    return folder


def bge_m3(folder: Path) -> Path:
    """Save a checkpoint as BGE-M3's: XLM-R, a pooling of ``[CLS]``, and two layers in pickles."""
    tokenizer = unigram()
    config = XLMRobertaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=24, num_attention_heads=3,
        num_hidden_layers=2, intermediate_size=40, max_position_embeddings=66, type_vocab_size=1,
        pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(7)
    model = XLMRobertaModel(config)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(float("norm" in name.lower() and name.endswith("weight")), 0.2)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Norm", "Normalize")]
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    for name, rows in (("sparse", 1), ("colbert", 24)):
        layer = {"weight": _random(rows, 24, seed=rows), "bias": _random(rows, seed=rows + 1)}
        torch.save(layer, folder / f"{name}_linear.pt")
    return folder
