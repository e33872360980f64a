"""Labels of tokens, and spans of answers: one torch module, graphs and gate figures."""

from typing import Final

import numpy as np
from torch import Tensor, nn

from cloze.export.graph.builder import GraphBuilder, linear
from cloze.export.heads.head import (
    ExportHead,
    HeadGraph,
    HeadSetup,
    Transform,
    agreement,
    figure,
    on_rows,
    token_rows,
)
from cloze.export.measure.scorer import Floats
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import span, token_classification
from cloze.model_store.heads.token_classification import read_options


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


def _label_agreement(pairs: list[tuple[Floats, Floats]]) -> float:
    """Return the share of tokens for which both models choose the same label."""
    return float(np.concatenate([a.argmax(1) == b.argmax(1) for a, b in pairs]).mean())


_FIGURE = "token_classification_agreement"

TOKEN_CLASSIFICATION: Final = ExportHead(
    head=token_classification.HEAD,
    module=TokenHead,
    write=_write,
    reference=on_rows(token_rows, token_classification.TOKEN_LOGITS),
    measure=figure(_FIGURE, token_classification.HEAD, _label_agreement),
    classes=("ForTokenClassification",),
    task_type="TOKEN_CLS",
    limits={_FIGURE: 0.95},
    fine_tuned=True,
    needs_class=True,
    read_options=read_options,
)


# ---- spans ---------------------------------------------------------------------------------------


def _write_span(head: TokenHead, graph: HeadGraph) -> None:
    rows = graph.linear_ops.to_float32(graph.rows)
    graph.output(head.write(graph.g, rows, span.HEAD.name), span.SPAN_LOGITS)


SPAN: Final = ExportHead(
    head=span.HEAD,
    module=TokenHead,
    write=_write_span,
    reference=lambda head, batch: {span.SPAN_LOGITS.name: head(batch.rows)},
    measure=figure("qa_span_agreement", span.HEAD, agreement, GateTexts.questions),
    classes=("ForQuestionAnswering",),
    task_type="QUESTION_ANS",
    limits={"qa_span_agreement": 0.95},
    fine_tuned=True,
)
