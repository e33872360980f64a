"""Labels of tokens, and spans of answers: one torch module, graphs and gate figures."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from cloze.export.graph.builder import GraphBuilder, linear
from cloze.export.heads.head import (
    ExportHead,
    HeadGraph,
    HeadSetup,
    Transform,
    agreement,
    compared,
    on_rows,
    token_rows,
)
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import span, token_classification
from cloze.model_store.heads.token_classification import read_options
from cloze.model_store.layouts import Placement


class TokenHead(nn.Module):
    """One logit per label for each token (Devlin et al. 2019, section 5.3).

    Without labels, a token has two logits, as the start and as the end of an answer (section 4.2).
    """

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        logits = 2 if setup.options is None else setup.options.logits
        self.transform = Transform(setup) if setup.spec.has("transform") else None
        self.classifier = nn.Linear(setup.config.hidden_size, logits)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [R, L] of ``rows`` [R, H]."""
        logits: Tensor = self.classifier(self.transform(rows) if self.transform else rows)
        return logits

    def write(self, g: GraphBuilder, rows: str, name: str) -> str:
        """Write the logits of rows [R, H]; the names of weights begin with ``name``."""
        if self.transform:
            rows = self.transform.write(g, rows, name)
        return linear(g, rows, f"{name}.classifier", self.classifier)


def _write(head: TokenHead, graph: HeadGraph) -> None:
    rows = graph.gather(token_classification.TOKEN_ROWS)
    logits = head.write(graph.g, rows, token_classification.HEAD.name)
    labels = head.classifier.out_features
    graph.output(logits, token_classification.TOKEN_LOGITS, L=labels)


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of tokens for which both models choose the same label."""
    scorers, name = (checkpoint, graph), token_classification.HEAD.name
    pairs = compared(scorers, name, texts.sentences())
    same = [one.argmax(1) == other.argmax(1) for one, other in pairs]
    return {"token_classification_agreement": float(np.concatenate(same).mean())}


TOKEN_CLASSIFICATION: Final = ExportHead(
    head=token_classification.HEAD,
    module=TokenHead,
    write=_write,
    reference=on_rows(token_rows, token_classification.TOKEN_LOGITS),
    measure=_measure,
    classes=("ForTokenClassification",),
    task_type="TOKEN_CLS",
    limits={"token_classification_agreement": 0.95},
    fine_tuned=True,
    needs_class=True,
    read_options=read_options,
)


# ---- spans ---------------------------------------------------------------------------------------


def _write_span(head: TokenHead, graph: HeadGraph) -> None:
    rows = graph.linear_ops.to_float32(graph.rows)
    graph.output(head.write(graph.g, rows, span.HEAD.name), span.SPAN_LOGITS)


def _reference_span(
    head: TokenHead, states: Tensor, _: Sequence[Any], __: Placement
) -> dict[str, Tensor]:
    return {span.SPAN_LOGITS.name: head(states[-1])}


def _measure_span(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of (question, context) pairs for which both models choose the same span."""
    pairs = compared((checkpoint, graph), span.HEAD.name, texts.questions())
    spans = [(one.argmax(0).tolist(), other.argmax(0).tolist()) for one, other in pairs]
    return {"qa_span_agreement": agreement(spans)}


SPAN: Final = ExportHead(
    head=span.HEAD,
    module=TokenHead,
    write=_write_span,
    reference=_reference_span,
    measure=_measure_span,
    classes=("ForQuestionAnswering",),
    task_type="QUESTION_ANS",
    limits={"qa_span_agreement": 0.95},
    fine_tuned=True,
)
