"""Entities of the request's labels, as GLiNER computes them: torch modules, graphs, gate figure.

The torch modules form the vector of each span, like the library gliner 0.2.29. The graph does not:
with W1 = [U | V], the first layer of the output of a span is ``U relu(s_i) + V relu(e_j) + b``,
so that each word is multiplied once, and a span costs one addition.

A bi-encoder gets the vectors of labels as they are multiplied with spans: `label_recipe` computes
them. Its LSTM, whose tensors checkpoints have, is never used.
"""

from collections.abc import Callable
from typing import Final, cast

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.graph.builder import GraphBuilder, linear
from cloze.export.graph.linear_ops import LinearOps
from cloze.export.heads.embedding import EmbeddingRecipe, Projection
from cloze.export.heads.head import ExportHead, HeadBatch, HeadGraph, HeadSetup, SampleSizes
from cloze.export.measure.scorer import Floats, Scorer, run_rows
from cloze.export.measure.texts import NAMING_SENTENCES, SENTENCES, GateTexts
from cloze.model_store import entity_spans
from cloze.model_store.entity_spans import EntityPrompt
from cloze.model_store.heads import entities
from cloze.model_store.heads.entities import EntityKind, EntityOptions, EntityRequest
from cloze.model_store.heads.head import GraphSpec
from cloze.model_store.sequences import TEXT_TOKENS
from cloze.model_store.tensors import TensorSpec

_LABEL_PARTS: Final = 8
"""Parts of the labels whose pairs with words are computed at once; bounds the memory."""

_NO_END: Final = 2**31 - 1
"""The end of a slice to the last row."""


def mlp(inner: int, size: int, out: int) -> nn.Sequential:
    """Return two layers with the numbers in a sequence that checkpoints have."""
    return nn.Sequential(nn.Linear(size, inner), nn.ReLU(), nn.Identity(), nn.Linear(inner, out))


class SpanScorer(nn.Module):
    """Scores spans of up to K words by the products of their vectors with those of labels.

    Args:
        is_marker: whether the layers are those of ``marker``, and not of ``markerV0``.
        reads_rows: whether labels are rows of the encoder, and not the vectors of a bi-encoder.
    """

    def __init__(
        self, size: int, max_width: int, *, is_marker: bool, reads_rows: bool = True
    ) -> None:
        super().__init__()
        self.max_width, inner = max_width, size * (2 if is_marker else 4)
        self.start, self.end = mlp(inner, size, size), mlp(inner, size, size)
        out = nn.Linear(2 * size, size) if is_marker else mlp(4 * size, 2 * size, size)
        self.out: nn.Linear | nn.Sequential = out
        self.label = mlp(4 * size, size, size) if reads_rows else None

    def forward(self, words: Tensor, counts: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [e, w, K, l] of words [e, w, D], by their counts, and labels."""
        queries = labels if self.label is None else self.label(labels)
        start, end = self.start(words), self.end(words).relu()
        count, width = words.shape[1], self.max_width
        # Behind the last word, the end of a span is 0, whatever the other texts of the batch.
        end = end * (torch.arange(count) < counts[:, None])[..., None]
        following = nn.functional.pad(end, (0, 0, 0, width - 1))
        following = torch.stack([following[:, k : k + count] for k in range(width)], 2)
        first = start.relu()[:, :, None].expand_as(following)
        vectors = self.out(torch.cat([first, following], -1))
        scores: Tensor = torch.einsum("ewkd,eld->ewkl", vectors, queries)
        return scores

    def write(self, ops: LinearOps, words: str, counts: str, labels: str) -> str:
        """Write the logits [e, w, K, l]."""
        g, queries = ops.g, labels
        if self.label is not None:
            queries = _write_mlp(ops, labels, "entities.label", self.label)
        first = self.out if isinstance(self.out, nn.Linear) else cast(nn.Linear, self.out[0])
        half = first.in_features // 2
        start, end = (
            ops.row_product(
                g.op("Relu", [_write_mlp(ops, words, f"entities.{name}", layers)]),
                f"entities.out.{name}",
                first.weight[:, columns],
                axis=2,
            )
            for name, layers, columns in (
                ("start", self.start, slice(half)),
                ("end", self.end, slice(half, None)),
            )
        )
        start = g.op("Add", [start, g.weight("entities.out.bias", first.bias)])
        end = g.op("Mul", [end, _write_mask(g, words, counts)])
        if isinstance(self.out, nn.Linear):  # without an activation, both parts are multiplied
            by_label = g.op("Transpose", [queries], perm=[0, 2, 1])
            start, end = (g.op("MatMul", [part, by_label]) for part in (start, end))
            return self._sum(g, start, end, lambda total: total)
        last = cast(nn.Linear, self.out[3])
        by_label = ops.row_product(queries, "entities.out.last.weight", last.weight.t(), axis=2)
        by_label = g.op("Transpose", [by_label], perm=[0, 2, 1])
        column = g.weight("entities.out.last.bias", last.bias[:, None], exact=True)
        bias = g.op("Transpose", [g.op("MatMul", [queries, column])], perm=[0, 2, 1])

        def score(total: str) -> str:
            return g.op("MatMul", [g.op("Relu", [total]), by_label])

        scores = self._sum(g, start, end, score)
        return g.op("Add", [scores, g.op("Unsqueeze", [bias, g.ints(1)])])

    def _sum(self, g: GraphBuilder, start: str, end: str, score: Callable[[str], str]) -> str:
        """Write the scores of each width from the two parts of a span, [e, w, n] each."""
        pads = g.ints(0, 0, 0, 0, self.max_width - 1, 0)
        padded = g.op("Pad", [end, pads])
        widths = []
        for k in range(self.max_width):
            last = k + 1 - self.max_width or _NO_END
            following = g.op("Slice", [padded, g.ints(k), g.ints(last), g.ints(1)])
            total = score(g.op("Add", [start, following]))
            widths.append(g.op("Unsqueeze", [total, g.ints(2)]))
        return g.op("Concat", widths, axis=2)


class TokenScorer(nn.Module):
    """Scores words as the start, the end and the inside of entities of each label."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.word, self.label = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.out = mlp(4 * size, 3 * size, entities.TOKEN_LOGITS)

    def forward(self, words: Tensor, _: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [e, w, 3, l] of words [e, w, D] and labels [e, l, D]."""
        word, word_factor = self.word(words)[:, :, None].chunk(2, -1)
        label, label_factor = self.label(labels)[:, None].chunk(2, -1)
        product = word_factor * label_factor
        parts = [word.expand_as(product), label.expand_as(product), product]
        scores: Tensor = self.out(torch.cat(parts, -1)).transpose(2, 3)
        return scores

    def write(self, ops: LinearOps, words: str, _: str, labels: str) -> str:
        """Write the logits [e, w, 3, l], some labels at a time."""
        g = ops.g
        word, word_factor = _write_halves(ops, words, "entities.word", self.word)
        label, label_factor = _write_halves(ops, labels, "entities.label", self.label)
        first, last = cast(nn.Linear, self.out[0]), cast(nn.Linear, self.out[3])
        parts = first.weight.chunk(3, 1)
        of_word = ops.row_product(word, "entities.out.0", parts[0], axis=2)
        of_word = g.op("Add", [of_word, g.weight("entities.out.bias", first.bias)])
        of_word = g.op("Unsqueeze", [of_word, g.ints(2)])
        word_factor = g.op("Unsqueeze", [word_factor, g.ints(2)])
        of_label = ops.row_product(label, "entities.out.1", parts[1], axis=2)
        of_label = g.op("Unsqueeze", [of_label, g.ints(1)])
        label_factor = g.op("Unsqueeze", [label_factor, g.ints(1)])
        count = g.op("Shape", [labels], start=1, end=2)
        scores = []
        for number in range(_LABEL_PARTS):
            begin, end = (
                g.op("Div", [g.op("Mul", [count, g.ints(n)]), g.ints(_LABEL_PARTS)])
                for n in (number, number + 1)
            )
            mine, factor = (
                g.op("Slice", [values, begin, end, g.ints(2)])
                for values in (of_label, label_factor)
            )
            product = g.op("Mul", [word_factor, factor])
            product = ops.row_product(product, "entities.out.2", parts[2], axis=3)
            total = g.op("Relu", [g.op("Sum", [product, of_word, mine])])
            scores.append(linear(g, total, "entities.out.last", last))
        joined = g.op("Concat", scores, axis=2)
        return g.op("Transpose", [joined], perm=[0, 1, 3, 2])


def _write_mask(g: GraphBuilder, words: str, counts: str) -> str:
    """Write 1 for each word of a text, and 0 behind its last word: [e, w, 1]."""
    count = g.op("Squeeze", [g.op("Shape", [words], start=1, end=2)])
    numbers = g.op("Range", [g.number(0), count, g.number(1)])
    column = g.op("Unsqueeze", [g.op("Cast", [counts], to=TensorProto.INT64), g.ints(1)])
    mask = g.op("Cast", [g.op("Less", [numbers, column])], to=TensorProto.FLOAT)
    return g.op("Unsqueeze", [mask, g.ints(2)])


def _write_mlp(ops: LinearOps, x: str, name: str, layers: nn.Sequential) -> str:
    inner = _write_linear(ops, x, f"{name}.0", cast(nn.Linear, layers[0]))
    return _write_linear(ops, ops.g.op("Relu", [inner]), f"{name}.3", cast(nn.Linear, layers[3]))


def _write_linear(ops: LinearOps, x: str, name: str, layer: nn.Linear) -> str:
    """Write ``x @ W^T + b``: [e, n, in] -> [e, n, out]."""
    product = ops.row_product(x, f"{name}.weight", layer.weight, axis=2)
    return ops.g.op("Add", [product, ops.g.weight(f"{name}.bias", layer.bias)])


def _write_halves(ops: LinearOps, x: str, name: str, layer: nn.Linear) -> tuple[str, str]:
    g, size, both = ops.g, layer.in_features, _write_linear(ops, x, name, layer)
    return (
        g.op("Slice", [both, g.ints(0), g.ints(size), g.ints(2)]),
        g.op("Slice", [both, g.ints(size), g.ints(2 * size), g.ints(2)]),
    )


class EntityHead(nn.Module):
    """Scores the words of texts for the labels before them.

    Args:
        size: D, the width of words and labels.
        layers: number of layers of the LSTM over the words.
        is_projected: whether D is not the encoder's width H.
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        layers: int,
        scorer: SpanScorer | TokenScorer,
        options: EntityOptions,
        *,
        is_projected: bool,
    ) -> None:
        super().__init__()
        self.options = options
        self.projection = nn.Linear(hidden_size, size) if is_projected else None
        self.lstm = (
            nn.LSTM(size, size // 2, layers, batch_first=True, bidirectional=True)
            if layers
            else None
        )
        self.scorer = scorer

    def forward(self, words: Tensor, counts: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [e, w, k, l] of words [e, w, H], by their counts, and labels."""
        if self.projection is not None:
            words = self.projection(words)
            labels = self.projection(labels) if self.options.label_size is None else labels
        if self.lstm is not None and words.shape[1]:
            lengths = counts.clamp(min=1)
            packed = nn.utils.rnn.pack_padded_sequence(words, lengths, True, False)
            states, _ = self.lstm(packed)
            words, _ = nn.utils.rnn.pad_packed_sequence(states, True, total_length=words.shape[1])
        scores: Tensor = self.scorer(words, counts, labels)
        return scores


def _rows(head: EntityHead) -> list[TensorSpec]:
    words = [entities.ENTITY_WORDS]
    return words if head.options.label_size else [*words, entities.ENTITY_LABELS]


def _write(head: EntityHead, graph: HeadGraph) -> None:
    g, ops = graph.g, graph.linear_ops
    words = graph.gather(entities.ENTITY_WORDS)
    counts = graph.input(entities.ENTITY_WORD_COUNTS)
    has_rows, projection = head.options.label_size is None, head.projection
    if has_rows:
        labels = graph.gather(entities.ENTITY_LABELS)
    else:
        labels = graph.input(entities.ENTITY_LABEL_VECTORS)
    if projection is not None:
        # In fp32: a few of the encoder's channels are many times larger than the others.
        words = linear(g, words, "entities.projection", projection)
        labels = linear(g, labels, "entities.projection", projection) if has_rows else labels
    if head.lstm is not None:
        words = _write_lstm(g, words, counts, head.lstm)
    scores = head.scorer.write(ops, words, counts, labels)
    graph.output(scores, entities.ENTITY_SCORES, k=head.options.logits)


def _write_lstm(g: GraphBuilder, words: str, counts: str, lstm: nn.LSTM) -> str:
    """Write an LSTM in both directions over the first words of each text, [e, w, D]."""
    states = g.op("Transpose", [words], perm=[1, 0, 2])
    size = lstm.input_size
    for layer in range(lstm.num_layers):
        inputs, states_, input_bias, state_bias = (
            torch.stack(
                [_gates(getattr(lstm, f"{kind}_l{layer}{way}")) for way in ("", "_reverse")]
            )
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        name = f"entities.lstm.{layer}"
        weights = [
            g.weight(f"{name}.input", inputs, exact=True),
            g.weight(f"{name}.state", states_, exact=True),
            g.weight(f"{name}.bias", torch.cat([input_bias, state_bias], 1), exact=True),
        ]
        both = g.op(
            "LSTM",
            [states, *weights, counts],
            hidden_size=lstm.hidden_size,
            direction="bidirectional",
        )  # [w, 2, e, D / 2]
        in_order = g.op("Transpose", [both], perm=[0, 2, 1, 3])
        states = g.op("Reshape", [in_order, g.ints(0, 0, size)])
    return g.op("Transpose", [states], perm=[1, 0, 2])


def _gates(rows: Tensor) -> Tensor:
    """Return the rows of the gates in ONNX's order: input, output, forget, cell."""
    input_, forget, cell, output = rows.chunk(4)
    return torch.cat([input_, output, forget, cell])


def _reference(head: EntityHead, batch: HeadBatch) -> dict[str, Tensor]:
    size, options = head.options.label_size, {entities.HEAD.name: head.options}
    spec = GraphSpec(batch.placement.layout, (), token_types=False, options=options)
    feeds = entities.HEAD.pack(batch.requests, batch.placement, spec)
    words, counts, labels = map(torch.from_numpy, feeds.values())
    labels = batch.rows[labels.long()] if size is None else labels.to(batch.rows)
    scores = head(batch.rows[words.long()], counts.long(), labels)
    return {entities.ENTITY_SCORES.name: scores}


def _sample(rng: np.random.Generator, sizes: SampleSizes) -> EntityRequest:
    """Return a request for some of a sequence's tokens; any of them may stand for words."""
    count = int(rng.integers(1, max(2, sizes.tokens // 2)))
    words = rng.choice(sizes.tokens, count, replace=False)
    positions, number = tuple(sorted(words.tolist())), int(rng.integers(1, 6))
    options = sizes.options[entities.HEAD.name]
    assert isinstance(options, EntityOptions)
    if (size := options.label_size) is not None:
        vectors = rng.standard_normal((number, size), np.float32)
        return EntityRequest(positions, vectors=vectors)
    return EntityRequest(positions, tuple(rng.integers(0, sizes.tokens, number).tolist()))


# ---- the quality gate ----------------------------------------------------------------------------

GATE_LABELS: Final = ("person", "organization", "location", "date", "product", "event", "animal")
_FIGURE: Final = "entity_f1"

_LEAST_SCORE: Final = 0.1
"""Score above which a span counts: about the lowest threshold of use.

Thousands of spans have scores near 0, which would outweigh the entities.
"""


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the F1 of the graph's scores; those of the checkpoint are taken for right."""
    options = texts.options[entities.HEAD.name]
    assert isinstance(options, EntityOptions)
    sentences = [
        [texts.word_ids(text[slice(*at)]) for at in entity_spans.split_words(text)]
        for text in (*NAMING_SENTENCES, *SENTENCES)
    ]
    if texts.label_vectors is None:
        prompt = EntityPrompt.of([texts.word_ids(label) for label in GATE_LABELS], options)
    else:
        prompt = EntityPrompt(vectors=texts.label_vectors)
    room = texts.max_tokens - TEXT_TOKENS - len(prompt.ids)
    sequences = [prompt.sequence(entity_spans.fitting(words, room)) for words in sentences]
    rows = [texts.row(ids) for ids, _ in sequences]
    requests = [{entities.HEAD.name: request} for _, request in sequences]
    expected, scores = (
        np.concatenate([
            entity_spans.scores(output[entities.HEAD.name].array, options.kind).ravel()
            for output in run_rows(scorer, rows, requests)
        ])
        for scorer in (checkpoint, graph)
    )  # fmt: skip
    return {_FIGURE: score_f1(expected, scores)}


def score_f1(expected: Floats, scores: Floats) -> float:
    """Return the F1 of spans that are entities as much as their scores say.

    It is ``2 sum(min(p, q)) / sum(p + q)``, of the scores p and q of a span that has more than 0.1
    in one of both; 1 if no span has. Where all scores are 0 or 1, it is the usual F1. An entity
    whose score falls from 0.51 to 0.49 costs little, and one that falls from 0.95 to 0.05 nearly
    all of itself. So models that are unsure of everything pass with good scales, though a threshold
    and the choice among overlapping spans turn their smallest differences into other entities.

    Args:
        expected: of the checkpoint, any shape.
        scores: of the graph, in this shape.
    """
    counted = np.maximum(expected, scores) > _LEAST_SCORE
    total = float((expected + scores)[counted].sum())
    return 2 * float(np.minimum(expected, scores)[counted].sum()) / total if total else 1.0


def label_recipe(layers: nn.ModuleDict) -> EmbeddingRecipe:
    """Return how a bi-encoder embeds a label: the mean of all tokens, and the layers after it.

    The library projects tokens before their mean, which is the same.

    Args:
        layers: ``label``, an `mlp`, and ``projection`` if labels have another width than words.
    """
    label = cast(nn.Sequential, layers["label"])
    steps = [(label[0], "ReLU"), (label[3], "Identity")]
    if "projection" in layers:
        steps.insert(0, (layers["projection"], "Identity"))
    linears = [(cast(nn.Linear, layer), activation) for layer, activation in steps]
    made = [Projection(one.weight, one.bias, activation) for one, activation in linears]
    return EmbeddingRecipe(steps=tuple(made), normalize=False)


def _make(setup: HeadSetup) -> EntityHead:
    """Return a new head with random weights, and the vectors of the encoder's width."""
    options, size = setup.options, setup.config.hidden_size
    assert isinstance(options, EntityOptions)
    is_token = options.kind is EntityKind.TOKEN
    scorer = TokenScorer(size) if is_token else SpanScorer(size, options.max_width, is_marker=False)
    return EntityHead(size, size, 1, scorer, options, is_projected=False)


ENTITIES: Final = ExportHead(
    head=entities.HEAD,
    module=_make,
    of_family=False,
    write=_write,
    rows=_rows,
    reference=_reference,
    sample=_sample,
    measure=_measure,
    limits={_FIGURE: 0.95},
    fine_tuned=True,
)
