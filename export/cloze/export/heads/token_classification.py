"""Token classification: torch module, graph, labels and gate figure."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from torch import Tensor, nn

from cloze.export.graph.builder import linear
from cloze.export.heads.head import (
    ExportHead,
    HeadGraph,
    HeadSetup,
    Transform,
    of_sentences,
    token_rows,
)
from cloze.export.measure.scorer import Scorer
from cloze.export.measure.texts import GateTexts
from cloze.model_store.heads import token_classification
from cloze.model_store.heads.token_classification import read_options
from cloze.model_store.layouts import Placement


class TokenClassificationHead(nn.Module):
    """One logit per label for each token (Devlin et al. 2019, section 5.3)."""

    def __init__(self, setup: HeadSetup) -> None:
        super().__init__()
        self.transform = Transform.of(setup)
        self.classifier = nn.Linear(setup.config.hidden_size, setup.options.logits)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the logits [R, L] of ``rows`` [R, H]."""
        logits: Tensor = self.classifier(self.transform(rows) if self.transform else rows)
        return logits


def _write(head: TokenClassificationHead, graph: HeadGraph) -> None:
    rows = graph.gather(token_classification.TOKEN_ROWS)
    if head.transform:
        rows = head.transform.write(graph.g, rows, "token_classification")
    logits = linear(graph.g, rows, "token_classification.classifier", head.classifier)
    labels = head.classifier.out_features
    graph.output(logits, token_classification.TOKEN_LOGITS, L=labels)


def _reference(
    head: TokenClassificationHead, states: Tensor, requests: Sequence[Any], placement: Placement
) -> dict[str, Tensor]:
    rows = states[-1]
    logits: Tensor = head(rows[token_rows(requests, placement)])
    return {token_classification.TOKEN_LOGITS.name: logits}


def _measure(checkpoint: Scorer, graph: Scorer, texts: GateTexts) -> dict[str, float]:
    """Return the share of tokens for which both models choose the same label."""
    pairs = of_sentences((checkpoint, graph), token_classification.HEAD.name, texts)
    same = [one.argmax(1) == other.argmax(1) for one, other in pairs]
    return {"token_classification_agreement": float(np.concatenate(same).mean())}


EXPORT_HEAD: Final = ExportHead(
    head=token_classification.HEAD,
    module=TokenClassificationHead,
    write=_write,
    reference=_reference,
    measure=_measure,
    classes=("ForTokenClassification",),
    task_type="TOKEN_CLS",
    limits={"token_classification_agreement": 0.95},
    fine_tuned=True,
    needs_class=True,
    read_options=read_options,
)
