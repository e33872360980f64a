"""Serves until a signal, in one process or in front ends and engine processes."""

from cloze.service import server
from cloze.service.admin_socket import listening_on_admin_socket
from cloze.service.app import DEFAULT_REGISTRIES, Registries, single_process
from cloze.service.served_models import EngineFactory
from cloze.service.settings import Settings


def serve(settings: Settings) -> int:
    """Serve until a signal, in the processes that the settings select.

    Returns:
        The exit code: 0 after a drain, 1 when an engine died.

    Raises:
        StartupError: a setting, a bundle, a device or the port is wrong.
    """
    if settings.frontends or settings.gpus > 1:
        from cloze.service.processes.supervisor import (
            supervise,  # a single process works without msgspec
        )

        return supervise(settings)
    return serve_in_one_process(settings)


def serve_in_one_process(
    settings: Settings,
    make_engine: EngineFactory | None = None,
    registries: Registries = DEFAULT_REGISTRIES,
) -> int:
    """Serve until a signal, with the engines in this process.

    Args:
        settings: the operator's settings.
        make_engine: opens a bundle's engine; None selects `OnnxEngine`.
        registries: the tasks and protocols to offer.

    Returns:
        The exit code 0. The process exits with 1 inside this function if an engine is dead.

    Raises:
        StartupError: a setting, a bundle, a device or the port is wrong.
    """
    server.begin(settings)
    server.warn_of_unknown_variables()
    listener = server.bind(settings)
    with listening_on_admin_socket(settings.admin_socket) as admin:
        service = single_process(settings, make_engine, registries)
        server.listen(listener, settings)
        last = server.run(service, settings, [listener, *admin])
    server.exit_if_dead(last)
    return 0
