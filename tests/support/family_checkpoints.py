"""Random checkpoints of every family, and the numbers of transformers and of our modules.

All weights are random, biases and norms included: transformers' defaults of 0 and 1 hide errors.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from tests.support.tokenizer_kinds import (
    byte_level,
    byte_level_with_brackets,
    mpnet_wordpiece,
    unigram,
    wordpiece,
)

SIZES: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 40,
    "max_position_embeddings": 30, "layer_norm_eps": 1e-5, "attn_implementation": "eager",
}  # fmt: skip
"""Odd sizes: two that are equal could be exchanged unnoticed."""

LABELS = {0: "a", 1: "b", 2: "c"}

OWN: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "distilbert": {"dim": 24, "n_heads": 3, "n_layers": 2, "hidden_dim": 40},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "camembert": {"type_vocab_size": 2},
    "ernie": {"type_vocab_size": 4, "use_task_id": True, "task_type_vocab_size": 3},
    "mpnet": {"max_position_embeddings": 160},
    "electra": {"embedding_size": 16, "hidden_act": "relu"},
    "albert": {
        "embedding_size": 16, "hidden_act": "gelu_new", "num_hidden_layers": 5,
        "num_hidden_groups": 2, "inner_group_num": 2,
    },
    "modernbert": {
        "num_hidden_layers": 3, "local_attention": 8, "norm_eps": 1e-4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "global_rope_theta": 400.0, "local_rope_theta": 70.0, "pad_token_id": 3,
        "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    },
    "mobilebert": {
        "embedding_size": 10, "intra_bottleneck_size": 12, "num_feedforward_networks": 3,
        "hidden_act": "relu",
    },
    "nomic_bert": {
        "type_vocab_size": 2, "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 30.0},
    },
    "gte": {"type_vocab_size": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "deberta-v2": {
        "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False,
        "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
    },
}  # fmt: skip
"""Settings of each family beside `SIZES`."""

TOKENIZERS = {
    "roberta": byte_level,
    "xlm-roberta": unigram,
    "camembert": unigram,
    "mpnet": mpnet_wordpiece,
    "albert": unigram,
    "modernbert": byte_level_with_brackets,
    "deberta-v2": unigram,
}

WITHOUT_QUESTIONS = {"nomic_bert", "gte"}
"""Families without a class of question answering in transformers."""

OFFSET = {"roberta", "xlm-roberta", "camembert", "mpnet"}
"""Families whose positions begin at row 2."""

CLASSES = {
    "masked_lm": transformers.AutoModelForMaskedLM,
    "span": transformers.AutoModelForQuestionAnswering,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
}


def settings_of(family: str, tokenizer: Tokenizer, **settings: Any) -> Any:
    """Return the settings of a family; the value ``...`` leaves one out."""
    kind = transformers.CONFIG_MAPPING[family]
    given = {"pad_token_id": 1 if family in OFFSET else 0} | SIZES | OWN[family]
    given |= {"vocab_size": tokenizer.get_vocab_size()} | settings
    return kind(**{name: value for name, value in given.items() if value is not ...})


def save(family: str, head: str, folder: Path, **settings: Any) -> Any:
    """Save a random checkpoint, and return transformers' module."""
    tokenizer = TOKENIZERS.get(family, wordpiece)()
    config = settings_of(family, tokenizer, **settings)
    config.id2label = settings.get(
        "id2label", LABELS if "classification" in head else {0: "x", 1: "y"}
    )
    torch.manual_seed(3)
    network = CLASSES[head].from_config(config)
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    network.tie_weights()
    network.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return network.eval()


def ids_of(network: Any, tokens: int, texts: int = 3) -> Tensor:
    """Return random ids [B, S] without special ones, so that no row is taken for padding."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(8, network.config.vocab_size, (texts, tokens), generator=generator)


def longest(network: Any) -> int:
    config = network.config
    return int(config.max_position_embeddings) - 2 * (config.model_type in OFFSET)


def theirs(network: Any, head: str, ids: Tensor) -> Tensor:
    with torch.no_grad():
        outputs = network(ids)
    if head == "span":
        return torch.stack([outputs.start_logits, outputs.end_logits], -1)
    return outputs.logits


def ours(checkpoint: Any, head: str, ids: Tensor) -> Tensor:
    model = checkpoint.model
    with torch.no_grad():
        hidden = model(ids)
        rows = hidden
        if head == "sequence_classification":
            is_mean = model.config.classifier_pooling == "mean"
            rows = hidden.mean(1) if is_mean else hidden[:, 0]
        module = getattr(model, head)
        result: Tensor = module(rows)
        return result


def same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


ONE_LABEL: dict[int, str] = {0: "relevance"}


def reranker(family: str, folder: Path, **changes: Any) -> Path:
    """Save a checkpoint that CrossEncoder reads with its ``tokenizer.json`` as it is."""
    changes = {"id2label": ONE_LABEL, "max_position_embeddings": 66} | changes
    save(family, "sequence_classification", folder, **changes)
    names = ("<pad>", "<s>", "</s>") if family in TOKENIZERS else ("[PAD]", "[CLS]", "[SEP]")
    settings = dict(zip(("pad_token", "cls_token", "sep_token"), names, strict=True))
    config = json.loads((folder / "config.json").read_text())
    types = ["token_type_ids"] * (config.get("type_vocab_size", 0) > 1)
    inputs = {"model_input_names": ["input_ids", "attention_mask", *types]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | inputs | kind))
    return folder
