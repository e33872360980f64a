"""The metrics of the service, in Prometheus's formats; the only importer of prometheus_client."""

from cloze.service.metrics.metrics import Metrics, ModelInfo, ScrapeSource
from cloze.service.metrics.processes import (
    SupervisorMetrics,
    forget_other_models,
    forget_process,
    share_folder,
    write_as,
)

__all__ = [
    "Metrics",
    "ModelInfo",
    "ScrapeSource",
    "SupervisorMetrics",
    "forget_other_models",
    "forget_process",
    "share_folder",
    "write_as",
]
