"""Serve until a signal: in one process, or with front ends before engine processes."""

from service import server
from service.app import DEFAULT_REGISTRIES, Registries, single_process
from service.served_models import EngineFactory
from service.settings import Settings


def serve(settings: Settings) -> int:
    """Serve with the processes that the settings ask for.

    Returns:
        The exit code: 0 after a drain, 1 when an engine died.

    Raises:
        StartupError: a setting, a bundle, a device or the port is wrong.
    """
    if settings.frontends or settings.gpus > 1:
        from service.processes.supervisor import supervise  # one process does not need it

        return supervise(settings)
    return serve_in_one_process(settings)


def serve_in_one_process(
    settings: Settings,
    make_engine: EngineFactory | None = None,
    registries: Registries = DEFAULT_REGISTRIES,
) -> int:
    """Serve with engines in this process; see `serve`.

    Args:
        settings: see `Settings`.
        make_engine: opens a bundle's engine; None: onnxruntime does.
        registries: what the service offers.
    """
    server.begin(settings)
    server.warn_of_unknown_variables()
    listener = server.bind(settings)
    service = single_process(settings, make_engine, registries)
    server.listen(listener, settings)
    server.run(service, settings, listener)
    server.exit_if_dead(service)
    return 0
