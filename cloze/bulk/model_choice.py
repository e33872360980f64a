"""Chooses the bundle of a run, as a server with the same settings does."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from cloze.bulk.errors import BulkError
from cloze.bulk.tasks import BulkTask
from cloze.model_sources import SourceError, bundles_to_serve
from cloze.model_store import Bundle, Store, StoreError
from cloze.model_store.error_lines import received
from cloze.service.errors import ServiceError, StartupError
from cloze.service.models.adapters import AdapterBundle, open_adapters
from cloze.service.models.pipeline import task_limits
from cloze.service.models.served_models import in_default_order
from cloze.service.settings import Settings
from cloze.service.tasks import TaskContext


def choose_bundle(settings: Settings, task: BulkTask, report: Callable[[str], None]) -> Bundle:
    """Return the adapter of the settings, the bundle of `model`, or the default of the task.

    Args:
        settings: the settings; `model` may name a bundle, a directory or a repository, and
            `adapter` one adapter.

    Raises:
        BulkError: there is no such model, or it lacks the task.
    """
    store, name = Store(settings.model_store), task.task.name
    try:
        references = bundles_to_serve(settings, report) or in_default_order(store)
        if (default := settings.default_models().get(name)) is not None:
            references = (default, *references)
        manifests = [store.manifest(reference) for reference in references]
        serving = [manifest for manifest in manifests if task.task.is_served_by(manifest)]
        if not manifests:
            raise BulkError(f"the model store {settings.model_store} has no bundle")
        if settings.adapter:
            takes = [one for one in manifests if one.adapters is not None] or manifests
            return _choose_adapter(settings, [store.open(one.reference) for one in takes], task)
        if not serving and len(manifests) == 1:
            tasks = ", ".join(manifests[0].tasks)
            raise BulkError(f"model {references[0]} cannot do {name}; it does {tasks}")
        if not serving:
            raise BulkError(f"no model in {settings.model_store} can do {name}")
        return store.open(serving[0].reference)
    except (StoreError, SourceError, StartupError) as error:
        raise BulkError(str(error)) from None


def _choose_adapter(settings: Settings, bases: Sequence[Bundle], task: BulkTask) -> AdapterBundle:
    name = task.task.name
    adapters = open_adapters(settings.adapter, bases, settings.adapter_memory_mb).bundles
    if len(adapters) != 1:
        raise BulkError(f"--adapter {settings.adapter[0]} has {len(adapters)} adapters; name one")
    manifest = adapters[0].manifest
    if not task.task.is_served_by(manifest):
        done = ", ".join(manifest.tasks)
        raise BulkError(f"adapter {manifest.name} cannot do {name}; it does {done}")
    return adapters[0]


def check_parameters(
    settings: Settings, bundle: Bundle, task: BulkTask, parameters: dict[str, Any]
) -> None:
    """Check the parameters of a task once, rather than with every row.

    Raises:
        BulkError: a parameter is wrong for the task or for the model.
    """
    try:
        context = TaskContext.of(bundle, task_limits(settings, bundle.manifest))
        checked = task.task.parameters(**parameters)
        task.task.prepare([task.probe(context)], checked, context)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = ".".join(map(str, problem["loc"]))
        got = received(problem, problem["input"])
        raise BulkError(f"{name}: {problem['msg'].lower()}{got}") from None
    except (ServiceError, StartupError) as error:
        raise BulkError(str(error)) from None
