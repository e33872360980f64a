"""The quality gate: compares a rounded graph with its checkpoint and refuses large differences.

Parity (`cloze.export.verify`) compares a graph with torch on the same rounded weights. The gate
compares the graph with the checkpoint before rounding.
"""

from collections.abc import Sequence

from cloze.export.errors import ExportError
from cloze.export.evaluation.scorer import Scorer
from cloze.export.evaluation.texts import GateTexts
from cloze.export.heads import EXPORT_HEADS
from cloze.model_store.heads import Head
from cloze.model_store.manifest import Gate


def pass_gate(
    checkpoint: Scorer, graph: Scorer, title: str, heads: Sequence[Head], texts: GateTexts
) -> Gate:
    """Compare a checkpoint with a graph of it.

    Returns:
        The figures and their limits.

    Raises:
        ExportError: a figure is below its limit, or is NaN.
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
                f"be at least {limits[name]}; export a higher precision, or weights of a higher "
                "precision"
            )
    return Gate(measured=measured, limits=limits)
