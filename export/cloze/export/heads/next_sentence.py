"""Next-sentence prediction: torch module, graph and gate figure."""

from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn

from cloze.export.graph.builder import linear
from cloze.export.heads.head import (
    ExportHead,
    HeadGraph,
    HeadSetup,
    agreement,
    cls_rows,
)
from cloze.export.measure.scorer import Scorer, head_arrays
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import next_sentence
from cloze.model_store.layouts import Placement


class NextSentenceHead(nn.Module):
    """The pooler (a tanh layer on ``[CLS]``), if any, and two logits: "is next" and "is not next".

    Source: Devlin et al. 2019, section 3.1, task 2.
    """

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        size = setup.config.hidden_size
        self.pooler = nn.Linear(size, size) if setup.config.pooler else None
        self.classifier = nn.Linear(size, 2)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [P, 2] of ``rows`` [P, H], the hidden states of ``[CLS]``."""
        logits: Tensor = self.classifier(rows if self.pooler is None else self.pooler(rows).tanh())
        return logits


def _write(head: NextSentenceHead, graph: HeadGraph) -> None:
    rows = graph.gather(next_sentence.PAIR_ROWS)
    if head.pooler is not None:
        rows = graph.g.op("Tanh", [linear(graph.g, rows, "next_sentence.pooler", head.pooler)])
    logits = linear(graph.g, rows, "next_sentence.classifier", head.classifier)
    graph.output(logits, next_sentence.PAIR_LOGITS)


def _reference(
    head: NextSentenceHead, states: Tensor, requests: Sequence[Any], placement: Placement
) -> dict[str, Tensor]:
    rows = states[-1]
    return {next_sentence.PAIR_LOGITS.name: head(rows[cls_rows(requests, placement)])}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of pairs, neighbours and others, for which both models choose one label."""
    name, labels = next_sentence.HEAD.name, []
    for ids, types in texts.sentence_pairs():
        one, other = (head_arrays(each, name, ids, types) for each in (checkpoint, graph))
        labels.append((one.argmax(), other.argmax()))
    return {"nsp_agreement": agreement(labels)}


EXPORT_HEAD: Final = ExportHead(
    head=next_sentence.HEAD,
    module=NextSentenceHead,
    write=_write,
    reference=_reference,
    measure=_measure,
    classes=("ForNextSentencePrediction", "ForPreTraining"),
    limits={"nsp_agreement": 0.95},
    incomplete={
        "pooler": "the checkpoint has a pooler but no next-sentence classifier",
        "classifier": "the checkpoint has a next-sentence classifier but no pooler",
    },
)
