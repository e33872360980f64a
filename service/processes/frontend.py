"""One front-end process: speaks HTTP, validates and tokenizes; its engines are other processes.

The supervisor starts it with ``python -m cloze.service.processes.frontend``.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import uvloop

from cloze.model_store import Bundle
from cloze.service import server
from cloze.service.app import front_end
from cloze.service.core import StartupError
from cloze.service.metrics import write_as
from cloze.service.processes.children import RETIRE, ChildConfig
from cloze.service.processes.remote import EngineLink, RemoteQueue
from cloze.service.processes.supervisor import ask_supervisor
from cloze.service.served_models import ServedModel, open_bundles

_ENGINE_WAIT_S = 5.0
"""For a running engine, before the front end accepts connections.

A restarted front end must not answer 503 beside others that are ready. Without any engine it must
still answer probes.
"""


class EngineProcesses:
    """The engine processes of the server.

    Args:
        config: names the engines' sockets and the served models.

    Attributes:
        links: one per engine process.
    """

    def __init__(self, config: ChildConfig) -> None:
        self._up = asyncio.Event()
        references = config.settings.model
        self.links = [EngineLink(path, references, self._up) for path in config.engine_sockets]

    def models(self, bundles: Sequence[Bundle]) -> list[ServedModel]:
        """Return the served models, in the order of their bundles."""
        queues = [RemoteQueue(self.links, model) for model in range(len(bundles))]
        pairs = zip(bundles, queues, strict=True)
        return [ServedModel(bundle, queue, queue.precision) for bundle, queue in pairs]

    async def wait_for_one(self) -> None:
        """Return once an engine runs, or after `_ENGINE_WAIT_S`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), _ENGINE_WAIT_S)


async def run_front_end(config: ChildConfig) -> None:
    """Answer HTTP until SIGTERM.

    Raises:
        StartupError: a bundle, the keys or the certificate cannot be opened.
    """
    engines = EngineProcesses(config)
    models = engines.models(open_bundles(config.settings))
    service = front_end(config.settings, models)
    folder = config.engine_sockets[0].parent
    service.reload_elsewhere = partial(
        ask_supervisor, config.parent, folder, is_draining=lambda: service.draining
    )
    async with asyncio.TaskGroup() as tasks:
        connections = [tasks.create_task(link.run()) for link in engines.links]
        await engines.wait_for_one()
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
    config = ChildConfig.from_arguments()
    server.begin(config.settings)
    write_as(config.name)
    try:
        uvloop.run(run_front_end(config))
    except StartupError as error:
        sys.stderr.write(f"cloze: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
