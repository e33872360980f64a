"""What pre-training optimises: modules that turn a batch of text into a loss. Knows no files and no loop.

Sources: Devlin et al. 2019 (masked tokens, next sentence); Joshi et al. 2020, section 3.2 (span boundaries);
Clark et al. 2020, "ELECTRA", section 2 (replaced tokens); Kiyono et al. 2021, "SHAPE" (shifted positions).
Shapes: B sequences of S tokens, H hidden size, V vocabulary, M chosen tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from export.heads import MASKED_LM, NEXT_SENTENCE
from export.models import Model
from export.models.encoder import Encoder
from export.train.batches import TextBatch
from export.train.embeddings import KeptEmbeddings
from export.train.pairs import Sentence
from export.train.recipe import Pretraining, Sizes

_LONGEST_RUN = 64
"""Positions inside a span that are told apart; spans that touch make longer runs than one span."""


class MaskedText(nn.Module):
    """Masked tokens, with the sentence objective and the span-boundary objective if the recipe has them.

    Args:
        model: what is trained.
        recipe: the weights of the losses.
        kept: the embeddings to stay close to; none: they may move.
    """

    def __init__(
        self, model: Model, recipe: Pretraining, kept: KeptEmbeddings | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self._kept, self._embedding_weight, self._z_loss = (
            kept,
            recipe.embedding_weight,
            recipe.z_loss,
        )
        self.boundary = SpanBoundary(model) if recipe.span_boundary else None
        self.sentence_weight = recipe.sentence_weight

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The weighted sum of the losses, and each with its accuracy."""
        assert self.model.masked_lm is not None
        hidden = self.model(
            batch.input_ids, batch.token_type_ids, batch.attention_mask, batch.first_positions
        )
        rows = hidden.flatten(0, 1)
        logits = self.model.masked_lm(rows[batch.positions])
        loss, figures = masked_loss(logits, batch.labels)
        if self._z_loss:
            loss = loss + self._z_loss * logits.float().logsumexp(1).square().mean()
        if self.boundary is not None:
            spans_loss = F.cross_entropy(self.boundary(rows, batch).float(), batch.labels)
            loss, figures["boundary_loss"] = loss + spans_loss, spans_loss
        if self.model.next_sentence is not None:
            sentence_logits = self.model.next_sentence(hidden[:, 0]).float()
            sentence_loss = F.cross_entropy(sentence_logits, batch.next_labels)
            figures["sentence_loss"] = sentence_loss
            figures["sentence_accuracy"] = (
                (sentence_logits.argmax(1) == batch.next_labels).float().mean()
            )
            loss = loss + self.sentence_weight * sentence_loss
        if self._kept is not None:
            cosine = self._kept.cosine(self.model, batch)
            figures["embedding_cosine"] = cosine
            loss = loss + self._embedding_weight * (1 - cosine)
        return loss, figures


def masked_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """``logits`` [M, V], ``labels`` [M] -> mean cross-entropy in nats, and the share of tokens found."""
    logits = logits.float()
    loss = F.cross_entropy(logits, labels)
    return loss, {"masked_loss": loss, "accuracy": (logits.argmax(1) == labels).float().mean()}


class SpanBoundary(nn.Module):
    """Each token of a span from the hidden states just outside it and its place in it, by two layers."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        assert model.masked_lm is not None
        size, eps = model.config.hidden_size, model.config.layer_norm_eps
        self.place = nn.Embedding(_LONGEST_RUN, size)
        self.layers = nn.Sequential(
            nn.Linear(3 * size, size),
            nn.GELU(),
            nn.LayerNorm(size, eps),
            nn.Linear(size, size),
            nn.GELU(),
            nn.LayerNorm(size, eps),
        )
        self.decoder = nn.Linear(size, model.config.vocab_size)
        self.decoder.weight = model.encoder.embeddings.word.weight

    def forward(self, rows: Tensor, batch: TextBatch) -> Tensor:
        """``rows`` [B * S, H] -> logits [M, V]."""
        first, last = (
            batch.spans[:, 0],
            batch.spans[:, 1],
        )  # [CLS] and [SEP] are never chosen: both neighbours exist
        place = self.place((batch.positions - first).clamp(max=_LONGEST_RUN - 1))
        return self.decoder(self.layers(torch.cat([rows[first - 1], rows[last + 1], place], 1)))  # type: ignore[no-any-return]


class ReplacedTokens(nn.Module):
    """A small generator fills masked tokens by sampling; the model finds which tokens were replaced.

    The sampling is not differentiated through. What is kept in the end is ``model``, an encoder without heads.
    """

    def __init__(self, model: Model, generator: Model, weight: float) -> None:
        super().__init__()
        self.model, self.generator, self.weight = model, generator, weight
        size = model.config.hidden_size
        self.finder = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, 1))

    def forward(self, batch: TextBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The generator's loss plus the weighted loss of finding, and the accuracy of both."""
        assert self.generator.masked_lm is not None
        hidden = self.generator(
            batch.input_ids, batch.token_type_ids, batch.attention_mask, batch.first_positions
        )
        logits = self.generator.masked_lm(hidden.flatten(0, 1)[batch.positions]).float()
        loss, figures = masked_loss(logits, batch.labels)
        figures["generator_accuracy"] = figures.pop("accuracy")

        original = batch.input_ids.flatten().clone()
        original[batch.positions] = batch.labels
        corrupted = original.clone()
        with torch.no_grad():
            noise = (
                -torch.empty_like(logits).exponential_().log()
            )  # Gumbel: argmax is a sample of the softmax
            corrupted[batch.positions] = (logits + noise).argmax(1)
        replaced = (corrupted != original).view_as(batch.input_ids)
        seen = replace(batch, input_ids=corrupted.view_as(batch.input_ids))
        found = self.model(
            seen.input_ids, seen.token_type_ids, seen.attention_mask, seen.first_positions
        )
        scores = self.finder(found).squeeze(-1).float()
        real = batch.attention_mask
        finding = F.binary_cross_entropy_with_logits(scores[real], replaced[real].float())
        figures["finding_loss"] = finding
        figures["accuracy"] = ((scores > 0) == replaced)[real].float().mean()
        return loss + self.weight * finding, figures


def initialise(module: nn.Module) -> None:
    """Embeddings normal with deviation 0.02, matrices as wide as that is for BERT-base, biases 0, LayerNorm 1 and 0.

    google-research/bert uses 0.02 at every size; 0.02 * sqrt(768 / H) keeps a layer's output as large as it is there.
    Positions begin as sinusoids (Vaswani et al. 2017, section 3.5): near ones are alike from the first step.
    """
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02 * math.sqrt(768 / part.in_features))
            nn.init.zeros_(part.bias)
    for part in module.modules():  # after the matrices: a tied decoder's weights are embeddings
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
    for part in module.modules():
        if isinstance(part, Encoder):
            _set_sinusoids(part.embeddings.position.weight)


@torch.no_grad()
def _set_sinusoids(positions: Tensor) -> None:
    """``positions`` [S, H], as large as the other embeddings."""
    count, size = positions.shape
    rates = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
    angles = torch.arange(count)[:, None] * rates
    positions.copy_(
        0.02 * math.sqrt(2) * torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :size]
    )


def make_pretraining(
    sizes: Sizes, vocab_size: int, recipe: Pretraining, seed: int
) -> MaskedText | ReplacedTokens:
    """Fresh modules for a recipe; ``.model`` is what will be kept."""
    torch.manual_seed(seed)
    sentence = [] if recipe.sentence is Sentence.NONE else [NEXT_SENTENCE]
    module: MaskedText | ReplacedTokens
    if recipe.method == "mlm":
        module = MaskedText(Model(sizes.config(vocab_size), [MASKED_LM, *sentence]), recipe)
    else:
        heads = max(1, round(sizes.heads * recipe.generator))
        small = sizes.model_copy(
            update={
                "hidden_size": sizes.hidden_size // sizes.heads * heads,
                "heads": heads,
                "intermediate_size": max(1, round(sizes.intermediate_size * recipe.generator)),
            }
        )
        generator = Model(small.config(vocab_size), [MASKED_LM])
        module = ReplacedTokens(Model(sizes.config(vocab_size)), generator, recipe.generator_weight)
    initialise(module)
    return module
