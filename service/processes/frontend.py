"""One front-end process: speaks HTTP, validates, tokenizes; its engines are other processes.

Started by the supervisor as ``python -m service.processes.frontend``.
"""

import socket
import sys
from collections.abc import Sequence

import zmq

from model_store import Bundle
from service import app
from service.core import StartupError
from service.lanes import Lane
from service.processes import start
from service.processes.remote import Link, RemoteQueue, models_of_first

_ENGINE_TIMEOUT_S = 600.0
"""For an engine to say what it runs; the supervisor starts front ends after they are up."""


def main() -> int:
    """Serve until SIGTERM; returns the exit code."""
    orders = start.Orders.from_arguments()
    app.begin(orders.settings)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = [Link(context, orders.folder, name) for name in orders.engines]
    try:
        service = app.Service(orders.settings, make_lanes=lambda bundles, _: _lanes(bundles, links))
    except StartupError as error:
        sys.stderr.write(f"cloze: {error}\n")
        return 2
    orders.say_ready()
    app.run(service, orders.settings, socket.socket(fileno=orders.listener))
    return 0


def _lanes(bundles: Sequence[Bundle], links: Sequence[Link]) -> list[Lane]:
    """Each model, its queue at the engines."""
    models = models_of_first(links, _ENGINE_TIMEOUT_S)
    if [model.reference for model in models] != [bundle.manifest.reference for bundle in bundles]:
        raise StartupError("the model store changed while the server started: engines and front ends see other bundles")
    return [Lane(bundle, RemoteQueue(links, number), models[number].precision) for number, bundle in enumerate(bundles)]


if __name__ == "__main__":
    sys.exit(main())
