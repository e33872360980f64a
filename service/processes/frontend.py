"""One front-end process: speaks HTTP, validates and tokenizes; its engines are other processes.

The supervisor starts it with ``python -m cloze.service.processes.frontend``.
"""

import asyncio
import socket
import sys
from contextlib import suppress
from functools import partial

from cloze.service import server
from cloze.service.app import DEFAULT_REGISTRIES, Service
from cloze.service.metrics import Metrics
from cloze.service.processes.children import RETIRE, ChildConfig, run_child
from cloze.service.processes.remote import EngineLink, RemoteQueue
from cloze.service.processes.supervisor import ask_supervisor
from cloze.service.protocols.operations import QUIET_ROUTES
from cloze.service.served_models import ServedModel, open_bundles
from cloze.service.tracing import make_tracing

_ENGINE_WAIT_S = 5.0
"""Longest time that a front end waits for an engine before it accepts connections.

A restarted front end must not answer 503 beside others that are ready. Without any engine it must
still answer probes.
"""


async def run_front_end(config: ChildConfig) -> None:
    """Answer HTTP until SIGTERM.

    Raises:
        StartupError: a bundle, the keys or the certificate cannot be opened.
    """
    up = asyncio.Event()
    bundles = open_bundles(config.settings)
    links = [EngineLink(path, config.settings.model, up) for path in config.engine_sockets]
    queues = [RemoteQueue(links, model) for model in range(len(bundles))]
    models = [
        ServedModel(bundle, queue, queue.precision)
        for bundle, queue in zip(bundles, queues, strict=True)
    ]
    service = Service(
        config.settings,
        DEFAULT_REGISTRIES,
        Metrics(shared=True),
        models,
        tracing=make_tracing(config.settings, QUIET_ROUTES),
    )
    folder = config.engine_sockets[0].parent
    service.reload_elsewhere = partial(
        ask_supervisor, config.parent, folder, is_draining=lambda: service.draining
    )
    async with asyncio.TaskGroup() as tasks:
        connections = [tasks.create_task(link.run()) for link in links]
        with suppress(TimeoutError):
            await asyncio.wait_for(up.wait(), _ENGINE_WAIT_S)
        await server.answer_http(
            service,
            config.settings,
            [socket.socket(fileno=descriptor) for descriptor in config.listeners],
            retire_on=RETIRE,
            before_accepting=config.report_ready,
        )
        for connection in connections:
            connection.cancel()


def main() -> int:
    """Serve until SIGTERM; return the exit code."""
    return run_child(run_front_end)


if __name__ == "__main__":
    sys.exit(main())
