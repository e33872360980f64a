"""Pre-training objectives: modules that turn a batch of text into a loss.

Sources: Devlin et al. 2019 (masked tokens, next sentence); Joshi et al. 2020, section 3.2 (span
boundaries); Clark et al. 2020, "ELECTRA", section 2 (replaced tokens).
Shapes: B sequences of S tokens, H hidden size, V vocabulary size, M chosen tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining, BertModel, PreTrainedModel

from cloze.export.measure.examples import UNPAIRED, SentenceObjective
from cloze.export.train.batches import TextBatch
from cloze.export.train.kept_embeddings import KeptEmbeddings
from cloze.export.train.recipe import Pretraining, Sizes
from cloze.export.train.rows import model_inputs

_GENERATOR_WIDTH, _DETECTION_WEIGHT = 0.25, 50.0
"""Width of the generator as a share of the model's, and weight of the loss of replaced tokens."""

_MAX_OFFSETS = 64
"""Offsets inside a span with an own embedding. Adjacent spans form runs longer than one span."""


class TextOutput(NamedTuple):
    """What a model computes of a batch of text.

    Attributes:
        hidden: [B, S, H], the output of the encoder.
        logits: [M, V], of the chosen tokens.
        pairs: [B, 2], logits of the sentence objective; None: the model has no such head.
    """

    hidden: Tensor
    logits: Tensor
    pairs: Tensor | None


def run_masked(network: Any, batch: TextBatch) -> TextOutput:
    """Run a model with a masked-LM head, of any class of transformers.

    The product with the vocabulary is computed of the chosen tokens only: the layer before the
    logits gets their rows.
    """
    hidden: list[Tensor] = []

    def choose(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (inputs[0].flatten(0, 1)[batch.positions],)

    def keep(_: nn.Module, __: object, output: Any) -> None:
        hidden.append(output[0])

    hooks = [
        network.get_output_embeddings().register_forward_pre_hook(choose),
        network.base_model.register_forward_hook(keep),
    ]
    try:
        output = network(**model_inputs(batch, network.config))
    finally:
        for hook in hooks:
            hook.remove()
    logits = output.get("prediction_logits", output.get("logits"))
    if logits.ndim == 3:  # MobileBERT multiplies without calling the layer
        logits = logits.flatten(0, 1)[batch.positions]
    return TextOutput(hidden[0], logits, output.get("seq_relationship_logits"))


class MaskedText(nn.Module):
    """Masked tokens, and the sentence and span-boundary objectives if the recipe has them.

    Args:
        network: a model of transformers with a masked-LM head, and perhaps one for pairs.
        kept_embeddings: target of the sentence embeddings; None: no such target.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        recipe: Pretraining,
        kept_embeddings: KeptEmbeddings | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self._kept = kept_embeddings
        self._recipe = recipe
        self.boundary = SpanBoundary(network) if recipe.span_boundary else None

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weighted sum of the losses, and each loss with its accuracy."""
        output, recipe = run_masked(self.network, batch), self._recipe
        loss, figures = masked_loss(output.logits, batch.labels)
        if self.boundary is not None:
            logits = self.boundary(output.hidden.flatten(0, 1), batch).float()
            figures["boundary_loss"] = F.cross_entropy(logits, batch.labels)
            loss = loss + figures["boundary_loss"]
        if output.pairs is not None and len(batch.next_labels):
            pair_logits = output.pairs.float()
            pairs = (batch.next_labels != UNPAIRED).sum().clamp_min(1)
            # Per row, so that a batch with few pairs has little weight.
            sentence_loss = F.cross_entropy(pair_logits, batch.next_labels, reduction="sum")
            sentence_loss = sentence_loss / len(pair_logits)
            figures["sentence_loss"] = sentence_loss
            right = pair_logits.argmax(1) == batch.next_labels
            figures["sentence_accuracy"] = right.sum() / pairs
            loss = loss + recipe.sentence_weight * sentence_loss
        if self._kept is not None:
            loss = loss + self._kept.loss(self.network.base_model, batch, figures)
        return loss, figures


def masked_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean cross-entropy in nats of logits [M, V], and the figures of the log."""
    logits = logits.float()  # argmax takes six times as long in bf16 on a CPU (torch 2.13)
    loss = F.cross_entropy(logits, labels)
    return loss, {"masked_loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}


class SpanBoundary(nn.Module):
    """Predicts each token of a span from the two hidden states around the span and its offset."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        words: Any = network.get_input_embeddings()
        size, width = network.config.hidden_size, words.weight.shape[1]
        eps = getattr(network.config, "layer_norm_eps", 1e-12)
        self.place = nn.Embedding(_MAX_OFFSETS, size)
        self.layers = nn.Sequential(
            nn.Linear(3 * size, size),
            nn.GELU(),
            nn.LayerNorm(size, eps),
            nn.Linear(size, width),
            nn.GELU(),
            nn.LayerNorm(width, eps),
        )
        self.decoder = nn.Linear(width, len(words.weight))
        self.decoder.weight = words.weight

    def forward(self, rows: Tensor, batch: TextBatch) -> Tensor:
        """Return logits [M, V] from hidden states ``rows`` [B * S, H]."""
        # [CLS] and [SEP] are never chosen, so both neighbours of a span exist.
        first, last = runs(batch.positions)
        place = self.place((batch.positions - first).clamp(max=_MAX_OFFSETS - 1))
        inputs = torch.cat([rows[first - 1], rows[last + 1], place], 1)
        return self.decoder(self.layers(inputs))  # type: ignore[no-any-return]


def runs(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last of the adjacent ``positions`` around each, all int64 [M]."""
    run = (positions.diff(prepend=positions[:1]) > 1).cumsum(0)
    first, end = torch.searchsorted(run, run), torch.searchsorted(run, run, right=True)
    return positions[first], positions[end - 1]


class ReplacedTokens(nn.Module):
    """Replaced-token detection: a small generator fills masked tokens, and the encoder finds them.

    No gradient flows through the sampling. A run keeps ``network``, an encoder without heads.
    """

    def __init__(self, network: PreTrainedModel, generator: PreTrainedModel) -> None:
        super().__init__()
        self.network, self.generator = network, generator
        size = network.config.hidden_size
        self.finder = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, 1))

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the generator's loss plus the weighted detection loss, and both accuracies."""
        logits = run_masked(self.generator, batch).logits.float()
        loss, figures = masked_loss(logits, batch.labels)
        figures["generator_accuracy"] = figures.pop("accuracy")

        corrupted, replaced = _sample_tokens(batch, logits)
        hidden = self.network(**model_inputs(corrupted, self.network.config))[0]
        scores = self.finder(hidden).squeeze(-1).float()
        real = batch.attention_mask
        detection_loss = F.binary_cross_entropy_with_logits(scores[real], replaced[real].float())
        figures["finding_loss"] = detection_loss
        figures["accuracy"] = ((scores > 0) == replaced)[real].float().mean()
        return loss + _DETECTION_WEIGHT * detection_loss, figures


@torch.no_grad()
def _sample_tokens(batch: TextBatch, logits: Tensor) -> tuple[TextBatch, Tensor]:
    """Return the batch with samples of the logits [M, V] at the chosen tokens.

    The second result is bool [B, S], True where a sample differs from the original.
    """
    original = batch.input_ids.flatten().clone()
    original[batch.positions] = batch.labels
    sampled = original.clone()
    gumbel_noise = -torch.empty_like(logits).exponential_().log()
    sampled[batch.positions] = (logits + gumbel_noise).argmax(1)  # a sample of the softmax
    shape = batch.input_ids.shape
    return replace(batch, input_ids=sampled.view(shape)), (sampled != original).view(shape)


def initialise(module: nn.Module) -> None:
    """Set random weights.

    Embeddings are normal with deviation 0.02, and matrices with deviation 0.02 * sqrt(768 / H).
    Biases are 0. google-research/bert uses 0.02 at every size; the factor keeps the outputs of a
    small model's layers as large as in BERT-base. Position embeddings start as sinusoids (Vaswani
    et al. 2017, section 3.5), so neighbouring positions are similar from the first step.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02 * math.sqrt(768 / part.in_features))
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    # After the matrices, because a tied decoder shares the weights of an embedding.
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
            if name.endswith("position_embeddings"):
                part.weight.data.copy_(_sinusoids(*part.weight.shape))


def _sinusoids(count: int, size: int) -> Tensor:
    """Return ``count`` sinusoids [S, H] as large as the other embeddings."""
    rates = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
    angles = torch.arange(count)[:, None] * rates
    sinusoids = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :size]
    return 0.02 * math.sqrt(2) * sinusoids


def make_pretraining(
    sizes: Sizes, vocab_size: int, recipe: Pretraining, seed: int
) -> MaskedText | ReplacedTokens:
    """Build the modules of a recipe with random weights. A run keeps their ``network``."""
    torch.manual_seed(seed)
    config = _bert_config(sizes, vocab_size)
    module: MaskedText | ReplacedTokens
    if recipe.method == "mlm":
        has_pairs = recipe.sentence is not SentenceObjective.NONE
        module = MaskedText((BertForPreTraining if has_pairs else BertForMaskedLM)(config), recipe)
    else:
        generator = BertForMaskedLM(_bert_config(sizes, vocab_size, _GENERATOR_WIDTH))
        network = BertModel(config, add_pooling_layer=False)
        module = ReplacedTokens(network, generator)
    initialise(module)
    return module


def _bert_config(sizes: Sizes, vocab_size: int, width: float = 1.0) -> BertConfig:
    """Return the config of a model whose width is a share of the width in ``sizes``."""
    heads = max(1, round(sizes.heads * width))
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size // sizes.heads * heads,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        intermediate_size=max(1, round(sizes.intermediate_size * width)),
        hidden_dropout_prob=sizes.dropout,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=sizes.max_tokens,
    )
