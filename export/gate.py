"""Whether a rounded graph may stand in for its checkpoint: both run, and differences are bounded.

Parity (`export.verify`) asks whether a graph computes what its precision should. The gate asks
whether that is good enough.
"""

from collections.abc import Sequence

from export.errors import ExportError
from export.evaluation.scorer import Scorer
from export.evaluation.texts import GateTexts
from export.heads import EXPORT_HEADS
from model_store.heads import Head
from model_store.manifest import Gate


def pass_gate(
    checkpoint: Scorer, graph: Scorer, title: str, heads: Sequence[Head], texts: GateTexts
) -> Gate:
    """Compare a checkpoint with a graph of it.

    Args:
        checkpoint: before anything was rounded.
        graph: of lower precision, or of rounded weights.
        title: the graph's, for the error.
        heads: of the graph.
        texts: what to compare on.

    Returns:
        What was measured.

    Raises:
        ExportError: a figure is below its limit, or is not a number.
    """
    measured: dict[str, float] = {}
    limits: dict[str, float] = {}
    for head in heads:
        export_head = EXPORT_HEADS[head.name]
        figures = export_head.measure(checkpoint, graph, texts)
        measured |= figures
        limits |= {name: export_head.limits[name] for name in figures}
    for name, value in measured.items():
        if not value >= limits[name]:  # NaN fails too
            raise ExportError(
                f"the {title} loses too much of this checkpoint: {name} is {value:.4f} and must "
                f"be {limits[name]}; keep it, or its weights, in a higher precision"
            )
    return Gate(measured=measured, limits=limits)
