"""One front-end process: speaks HTTP, validates, tokenizes; its engines are other processes.

Started by the supervisor as ``python -m service.processes.frontend``.
"""

import socket
import sys
import threading
from collections.abc import Sequence

import zmq

from model_store import Bundle
from service import app, server
from service.core import StartupError
from service.metrics import write_as
from service.processes import start
from service.processes.remote import Link, RemoteQueue
from service.served_models import ServedModel

_ENGINE_WAIT_S = 5.0
"""Longest wait for an engine before the front end accepts clients.

After that time probes must be answered, even if no engine runs.
"""


def main() -> int:
    """Serve until SIGTERM; returns the exit code."""
    config = start.ChildConfig.from_arguments()
    server.begin(config.settings)
    write_as(config.name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links: list[Link] = []
    came = threading.Event()

    class Engines:
        def models(self, bundles: Sequence[Bundle]) -> list[ServedModel]:
            references = [bundle.manifest.reference for bundle in bundles]
            links.extend(
                Link(context, config.folder, name, references, came) for name in config.engines
            )
            queues = [RemoteQueue(links, number) for number in range(len(bundles))]
            return [
                ServedModel(b, queue, queue.precision)
                for b, queue in zip(bundles, queues, strict=True)
            ]

    try:
        service = app.front_end(config.settings, Engines())
    except StartupError as error:
        sys.stderr.write(f"cloze: {error}\n")
        return 2
    came.wait(_ENGINE_WAIT_S)
    config.say_ready()
    server.run(service, config.settings, socket.socket(fileno=config.listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
