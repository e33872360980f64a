"""Labels of texts, and next-sentence prediction: one torch module, graphs and gate figures."""

from typing import Final

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor, nn

from cloze.export.blocks.layer import ACTIVATIONS, make_norm
from cloze.export.errors import ExportError
from cloze.export.graph.builder import GraphBuilder, layer_norm, linear
from cloze.export.heads.head import (
    ExportHead,
    HeadBatch,
    HeadGraph,
    HeadSetup,
    agreement,
    cls_rows,
    compared,
    figure,
    on_rows,
    write_activated,
)
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import next_sentence, sequence_classification
from cloze.model_store.heads.sequence_classification import read_options
from cloze.model_store.layouts import Layout

_CLOSE = 0.05
"""The accepted difference of a single logit, as a share of the spread of the logits."""


class SequenceHead(nn.Module):
    """A pooler on ``[CLS]``, if any, and one logit per label.

    In some families the pooler reads the mean of all rows, or a norm follows it. Without labels, a
    pair has two logits: "is next" and "is not next".
    Source: Devlin et al. 2019, sections 3.1 and 4.1.
    """

    norm: nn.LayerNorm | None

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        config = setup.config
        size = config.hidden_size
        self.pooler = nn.Linear(size, size, config.has_bias("head")) if config.pooler else None
        self.activation = ACTIVATIONS[setup.spec.activation or config.head_activation or "tanh"]
        self.norm = make_norm(config) if setup.spec.has("norm") else None
        self.reads_mean = config.classifier_pooling == "mean"
        self.classifier = nn.Linear(size, 2 if setup.options is None else setup.options.logits)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [C, L] of ``rows`` [C, H], one per sequence."""
        if self.pooler is not None:
            rows = self.activation.forward(self.pooler(rows))
        logits: Tensor = self.classifier(rows if self.norm is None else self.norm(rows))
        return logits

    def write(self, g: GraphBuilder, rows: str, name: str) -> str:
        """Write the logits of rows [C, H]; the names of weights begin with ``name``."""
        if self.pooler is not None:
            rows = write_activated(g, rows, f"{name}.pooler", self.pooler, self.activation)
        if self.norm is not None:
            rows = layer_norm(g, rows, f"{name}.norm", self.norm)
        return linear(g, rows, f"{name}.classifier", self.classifier)


def _write(head: SequenceHead, graph: HeadGraph) -> None:
    firsts = sequence_classification.CLASS_ROWS
    rows = _means(graph) if head.reads_mean else graph.gather(firsts)
    logits = head.write(graph.g, rows, sequence_classification.HEAD.name)
    labels = head.classifier.out_features
    graph.output(logits, sequence_classification.CLASS_LOGITS, L=labels)


def _means(graph: HeadGraph) -> str:
    """Write the mean of all rows of the sequences that begin at ``class_rows``: [C, H]."""
    if graph.layout is Layout.PACKED:
        raise ExportError(
            "a packed graph has no classifier of the mean of all tokens; leave out --precision fp16"
        )
    g = graph.g
    axis = g.ints(1)
    tokens = g.op("Squeeze", [g.op("Shape", [graph.hidden], start=1, end=2)])
    firsts = g.op("Cast", [graph.input(sequence_classification.CLASS_ROWS)], to=TensorProto.INT64)
    columns = g.op("Range", [g.number(0), tokens, g.number(1)])
    numbers = g.op("Add", [g.op("Unsqueeze", [firsts, axis]), columns])  # [C, S]
    return g.op("ReduceMean", [graph.rows_of(graph.hidden, numbers), axis], keepdims=0)


def _reference(head: SequenceHead, batch: HeadBatch) -> dict[str, Tensor]:
    rows = batch.rows[cls_rows(batch)]
    if head.reads_mean:
        means = [batch.rows[own].mean(0, keepdim=True) for own, _ in batch.asked()]
        rows = torch.cat([*means, rows[:0]])
    return {sequence_classification.CLASS_LOGITS.name: head(rows)}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of texts for which both models choose the same label.

    With one label: the share whose logits differ by at most a twentieth of the logits' spread.
    """
    rows = [*texts.sentences(), *texts.sentence_pairs()]
    pairs = compared((checkpoint, graph), sequence_classification.HEAD.name, rows)
    one, other = map(np.stack, zip(*pairs, strict=True))
    if one.shape[1] == 1:
        same = np.abs(one - other) <= _CLOSE * max(1.0, float(np.ptp(one)))
    else:
        same = one.argmax(1) == other.argmax(1)
    return {"text_classification_agreement": float(same.mean())}


SEQUENCE_CLASSIFICATION: Final = ExportHead(
    head=sequence_classification.HEAD,
    module=SequenceHead,
    write=_write,
    reference=_reference,
    measure=_measure,
    classes=("ForSequenceClassification",),
    task_type="SEQ_CLS",
    limits={"text_classification_agreement": 0.95},
    fine_tuned=True,
    needs_class=True,
    read_options=read_options,
)


# ---- next sentence -------------------------------------------------------------------------------


def _write_next(head: SequenceHead, graph: HeadGraph) -> None:
    rows = graph.gather(next_sentence.PAIR_ROWS)
    graph.output(head.write(graph.g, rows, next_sentence.HEAD.name), next_sentence.PAIR_LOGITS)


NEXT_SENTENCE: Final = ExportHead(
    head=next_sentence.HEAD,
    module=SequenceHead,
    write=_write_next,
    reference=on_rows(cls_rows, next_sentence.PAIR_LOGITS),
    measure=figure("nsp_agreement", next_sentence.HEAD, agreement, GateTexts.sentence_pairs),
    classes=("ForNextSentencePrediction", "ForPreTraining"),
    limits={"nsp_agreement": 0.95},
    incomplete={
        "pooler": "the checkpoint has a pooler but no next-sentence classifier",
        "classifier": "the checkpoint has a next-sentence classifier but no pooler",
    },
)
