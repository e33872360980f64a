"""Refuses a start for which the memory limit of the process is certainly too small.

Without the check, the kernel kills the process while it opens a model, and nothing says why.
"""

from collections.abc import Iterable
from typing import Final

from cloze.model_store import Bundle
from cloze.service.core import StartupError

_PROCESS_BYTES: Final = 70_000_000
"""Memory of a server without models; measured: 84 MB with the runtime loaded."""


def check_memory(bundles: Iterable[Bundle], limit: int | None) -> None:
    """Check that the weights of bundles fit into the memory.

    Weights on disk are a lower bound of those in memory, so nothing is refused that might run.

    Args:
        bundles: the bundles to serve.
        limit: most bytes of the process; None: there is no limit.

    Raises:
        StartupError: the process with its weights needs more.
    """
    if limit is None:
        return
    weights = {b.manifest.reference: _weight_bytes(b) for b in bundles}
    needed = _PROCESS_BYTES + sum(weights.values())
    if needed > limit:
        shown = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in weights.items())
        raise StartupError(
            f"the memory limit of this process is {limit / 1e6:.0f} MB, and the models need at "
            f"least {needed / 1e6:.0f} MB ({shown}); raise it, or serve fewer models"
        )


def _weight_bytes(bundle: Bundle) -> int:
    return sum(
        file.size for name, file in bundle.manifest.files.items() if name.endswith("weights.bin")
    )
