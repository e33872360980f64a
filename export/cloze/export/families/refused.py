"""The architectures that are refused by name: what each computes, and what to use instead.

`docs/models.md` has the same table, from `scripts/refusal-table`. Every other unknown
``model_type`` is refused too, without a reason.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Refusal(NamedTuple):
    """Why checkpoints of some architectures are not exported.

    Attributes:
        model_types: their values in ``config.json``.
        computes: what they compute that no block does.
        task: whether they have a task of this project.
        instead: what to use instead.
    """

    model_types: tuple[str, ...]
    computes: str
    task: str
    instead: str


_TRANSFORMERS, _TEI = "transformers", "text-embeddings-inference"
_GENERATE = "none: they generate text"
_ALL = "embeddings, classifiers, fill-mask"
_TUNED = "embeddings, classifiers"

REFUSALS: Final = (
    Refusal(
        ("xlnet",),
        "attention with relative positions over permuted orders, and a memory of earlier segments",
        "classifiers",
        "transformers; for new models, DeBERTa or RoBERTa",
    ),
    Refusal(
        ("t5", "mt5", "umt5", "longt5", "switch_transformers"),
        "an encoder with relative biases and RMS norms, and a decoder",
        "embeddings from the encoder alone (sentence-t5, gtr)",
        "sentence-transformers; for new models, all-mpnet-base-v2",
    ),
    Refusal(
        ("bart", "mbart", "pegasus", "marian", "m2m_100", "led", "blenderbot"),
        "an encoder and a decoder",
        "zero-shot classifiers (bart-large-mnli), which read the decoder's last token",
        "transformers; a cross-encoder for NLI of a family that is served",
    ),
    Refusal(
        ("mass", "prophetnet", "xlm-prophetnet", "encoder-decoder"),
        "an encoder and a decoder, pre-trained to generate spans (MASS) or several next tokens",
        _GENERATE,
        _TRANSFORMERS,
    ),
    Refusal(
        ("unilm", "layoutlm", "layoutlmv2", "layoutlmv3", "lilt", "markuplm"),
        "BERT with masks of sequence to sequence (UniLM), or with the places of words on a page",
        "labels of words on a page, whose boxes no request has",
        "transformers; for UniLM, MiniLM or BERT",
    ),
    Refusal(
        ("jina_bert", "jina-bert-v2"),
        "ALiBi biases on the scores and a gated feed-forward network (jina-embeddings-v2)",
        "embeddings",
        _TEI,
    ),
    Refusal(
        ("xlm-roberta-flash", "jina_embeddings_v3"),
        "rotary positions and one low-rank adapter per task (jina-embeddings-v3)",
        "embeddings",
        "text-embeddings-inference; multilingual-e5 or bge-m3",
    ),
    Refusal(
        ("eurobert",),
        "a Llama without its mask: rotary positions, RMS norms, grouped heads, gated network",
        _ALL,
        "transformers; xlm-roberta models",
    ),
    Refusal(
        ("roformer",),
        "rotary positions that turn neighbouring pairs of numbers, and a tokenizer of words",
        _ALL,
        "transformers; Chinese BERT or ERNIE",
    ),
    Refusal(
        ("longformer", "big_bird", "nystromformer", "yoso", "mra", "reformer"),
        "attention to windows, global or random tokens, or an approximation of the softmax",
        _TUNED,
        "transformers; for new models, bge-m3 reads 8,192 tokens",
    ),
    Refusal(
        ("funnel", "fnet", "canine", "convbert", "squeezebert", "perceiver", "tapas"),
        "pooled or convolved sequences, Fourier transforms for attention, characters, or tables",
        _TUNED,
        "transformers; ELECTRA or ALBERT",
    ),
    Refusal(
        ("deberta",),
        "DeBERTa-v1: queries, keys and values in one matrix, interleaved by head",
        "classifiers, fill-mask",
        "transformers; DeBERTa-v3",
    ),
    Refusal(
        ("flaubert", "xlm", "ibert", "rembert", "luke", "xmod", "esm", "megatron-bert"),
        "BERT with other norms, adapters, entities, integers or embeddings",
        _ALL,
        "transformers; CamemBERT for French, else xlm-roberta models",
    ),
    Refusal(
        ("clip", "siglip", "blip", "vilt", "wav2vec2", "hubert", "vit"),
        "images or sound",
        "none: requests have texts",
        _TRANSFORMERS,
    ),
    Refusal(
        ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "ctrl", "openai-gpt"),
        "attention to the left only",
        _GENERATE,
        "vLLM",
    ),
    Refusal(
        ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"),
        "attention to the left only, rotary positions, RMS norms, billions of weights",
        "embeddings and rerankers from the last token",
        "vLLM, text-embeddings-inference",
    ),
)
"""All architectures that are refused by name."""

REFUSED: Final[Mapping[str, Refusal]] = {
    name: refusal for refusal in REFUSALS for name in refusal.model_types
}
"""The refusals by ``model_type``."""


def reason(model_type: str) -> str | None:
    """Return why an architecture is refused and what to use instead; None: no reason is known."""
    refusal = REFUSED.get(model_type)
    if refusal is None:
        return None
    return f"it computes {refusal.computes}; use instead: {refusal.instead}"
