"""One front-end process: speaks HTTP, validates, tokenizes; its engines are other processes.

Started by the supervisor as ``python -m service.processes.frontend``.
"""

import socket
import sys
import threading
from collections.abc import Sequence

import zmq

from model_store import Bundle
from service import app
from service.core import StartupError
from service.lanes import Lane, Told
from service.metrics import write_as
from service.processes import start
from service.processes.remote import Link, RemoteQueue

_ENGINE_WAIT_S = 5.0
"""For an engine, before clients are let in: others are ready already, and nobody should meet the one that is not. While there is
no engine at all, probes must be answered."""


def main() -> int:
    """Serve until SIGTERM; returns the exit code."""
    orders = start.Orders.from_arguments()
    app.begin(orders.settings)
    write_as(orders.name)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links: list[Link] = []
    came = threading.Event()

    def lanes(bundles: Sequence[Bundle], _: Told) -> list[Lane]:
        references = [bundle.manifest.reference for bundle in bundles]
        links.extend(Link(context, orders.folder, name, references, came) for name in orders.engines)
        queues = [RemoteQueue(links, number) for number in range(len(bundles))]
        return [Lane(bundle, queue, queue.precision) for bundle, queue in zip(bundles, queues, strict=True)]

    try:
        service = app.Service(orders.settings, make_lanes=lanes)
    except StartupError as error:
        sys.stderr.write(f"cloze: {error}\n")
        return 2
    came.wait(_ENGINE_WAIT_S)
    orders.say_ready()
    app.run(service, orders.settings, socket.socket(fileno=orders.listener))
    return 0


if __name__ == "__main__":
    sys.exit(main())
