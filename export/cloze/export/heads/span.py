"""Extractive question answering: torch module, graph and gate figure."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from cloze.export.graph.builder import linear
from cloze.export.heads.head import ExportHead, HeadGraph, HeadSetup, Transform, agreement
from cloze.export.measure.scorer import Scorer, head_arrays
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import span
from cloze.model_store.layouts import Placement


class SpanHead(nn.Module):
    """Start and end logits of an answer's span per token (Devlin et al. 2019, section 4.2)."""

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        self.transform = Transform.of(setup)
        self.classifier = nn.Linear(setup.config.hidden_size, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [T, 2] of ``rows`` [T, H]."""
        logits: Tensor = self.classifier(self.transform(rows) if self.transform else rows)
        return logits


def _write(head: SpanHead, graph: HeadGraph) -> None:
    rows = graph.linear_ops.to_float32(graph.rows)
    if head.transform:
        rows = head.transform.write(graph.g, rows, "span")
    graph.output(linear(graph.g, rows, "span.classifier", head.classifier), span.SPAN_LOGITS)


def _reference(
    head: SpanHead, states: Tensor, _: Sequence[Any], __: Placement
) -> dict[str, Tensor]:
    rows = states[-1]
    return {span.SPAN_LOGITS.name: head(rows)}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of (question, context) pairs for which both models choose the same span."""
    name, spans = span.HEAD.name, []
    for ids, types in texts.questions():
        one, other = (head_arrays(each, name, ids, types)[0] for each in (checkpoint, graph))
        spans.append((one.argmax(0).tolist(), other.argmax(0).tolist()))
    return {"qa_span_agreement": agreement(spans)}


EXPORT_HEAD: Final = ExportHead(
    head=span.HEAD,
    module=SpanHead,
    write=_write,
    reference=_reference,
    measure=_measure,
    classes=("ForQuestionAnswering",),
    task_type="QUESTION_ANS",
    limits={"qa_span_agreement": 0.95},
    fine_tuned=True,
)
