"""Options of every training run beside its recipe. Does not import torch at run time."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cloze.export.errors import Report

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Schedule:
    """How often a run logs, evaluates and writes a checkpoint.

    Attributes:
        log: steps between two lines of the log.
        evaluate: steps between two evaluations; a short run is evaluated at least ten times.
        checkpoint: steps between two checkpoints.
        checkpoint_seconds: longest time between two checkpoints, even if fewer steps are done.
    """

    log: int = 20
    evaluate: int = 500
    checkpoint: int = 100
    checkpoint_seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Where a run computes and writes.

    Attributes:
        license: licence of the new checkpoint; None: that of the checkpoints it starts from.
    """

    run_dir: Path
    device: "torch.device"
    report: Report
    schedule: Schedule = Schedule()
    license: str | None = None
