"""Real, tiny, random checkpoints, made by transformers itself and saved as its users save them."""

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForQuestionAnswering,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.support.tokenizer_kinds import byte_level_with_brackets
from tests.support.vocabulary import vocabulary


def config(family: str, **sizes: object) -> BertConfig | DistilBertConfig:
    common = {"vocab_size": len(vocabulary()), "max_position_embeddings": 160}
    if family == "bert":
        own = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return BertConfig(
            **{**common, **own, "intermediate_size": 128, "attn_implementation": "eager", **sizes}
        )
    own = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128}
    return DistilBertConfig(**{**common, **own, "attn_implementation": "eager", **sizes})


CLASSES = {
    "bert": BertForPreTraining,
    "bert-mlm": BertForMaskedLM,
    "bert-plain": BertModel,
    "bert-qa": BertForQuestionAnswering,
    "distilbert": DistilBertForMaskedLM,
    "distilbert-qa": DistilBertForQuestionAnswering,
}


def make_model(kind: str, seed: int = 0, **sizes: object) -> PreTrainedModel:
    """A random model whose weights are large enough for its outputs to differ from text to text."""
    model = CLASSES[kind](config(kind.split("-")[0], **sizes))
    # Wider models need smaller weights, or 24 layers of them magnify rounding beyond any tolerance.
    spread = 0.8 * model.config.hidden_size**-0.5
    torch.manual_seed(
        seed
    )  # after the library's own draws, so that the weights do not depend on its version
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, spread)
    model.tie_weights()
    return model.eval()


def save_checkpoint(folder: Path, kind: str, seed: int = 0, **sizes: object) -> Path:
    """``config.json``, ``model.safetensors`` and ``vocab.txt``, uncased."""
    make_model(kind, seed, **sizes).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary()) + "\n")
    return folder


def save_modernbert(folder: Path, *tokens: str) -> Path:
    """Save a ModernBERT without a head, with random weights; its vocabulary ends with ``tokens``."""
    tokenizer = byte_level_with_brackets()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    names = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    ids = {f"{name}_token_id": tokenizer.token_to_id(token) for name, token in names.items()}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 48}
    settings = ModernBertConfig(
        **sizes,
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=4,
        local_attention=8,
        max_position_embeddings=160,
        bos_token_id=ids["cls_token_id"],
        eos_token_id=ids["sep_token_id"],
        **ids,
    )
    torch.manual_seed(9)
    network = ModernBertModel(settings)
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            parameter.normal_(float("norm" in name), 0.2)
    network.save_pretrained(folder)
    given = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **given).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    for name in ("bert", "bert-qa"):
        print(save_checkpoint(Path(sys.argv[1]) / name, name))
