"""The metrics of the service, in Prometheus's formats; the only importer of prometheus_client."""

from cloze.service.metrics.metrics import Metrics, ModelInfo
from cloze.service.metrics.processes import count_restarts, forget_process, share_folder, write_as

__all__ = [
    "Metrics",
    "ModelInfo",
    "count_restarts",
    "forget_process",
    "share_folder",
    "write_as",
]
