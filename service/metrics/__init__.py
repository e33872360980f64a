"""The metrics of the service, in Prometheus's formats; the only importer of prometheus_client."""

from cloze.service.metrics.metrics import Metrics, ModelInfo
from cloze.service.metrics.processes import (
    forget_other_models,
    forget_process,
    share_folder,
    supervisor_metrics,
    write_as,
)

__all__ = [
    "Metrics",
    "ModelInfo",
    "forget_other_models",
    "forget_process",
    "share_folder",
    "supervisor_metrics",
    "write_as",
]
