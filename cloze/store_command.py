"""``cloze store list | show | verify | remove``: the bundles of a model store."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloze.failing import fail
from cloze.model_store.embedding_space import embedding_space, own_recipes
from cloze.model_store.installation import install_command
from cloze.model_store.manifest import Gate, Manifest
from cloze.model_store.store import Store, StoreError
from cloze.options import complete_bundle, json_option, store_option
from cloze.tables import Row, print_rows

if TYPE_CHECKING:
    from cloze.service.models.adapters import AdapterBundle

T = TypeVar("T")

_MOST_ADAPTER_MB = 2**20
"""No limit: memory is limited where adapters are served."""


@click.group()
def store() -> None:
    """List, show, verify and remove the bundles of a model store."""


_adapter_option = click.option(
    "--adapter",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Adapters, as for `cloze serve --adapter`; may be repeated.",
)


@store.command("list")
@_adapter_option
@json_option
@store_option
def list_bundles(folders: tuple[Path, ...], as_json: bool, model_store: Path) -> None:
    """Print one line per bundle: name@version, tasks, precisions, family, size and date.

    With --adapter, the adapters are beneath the bundle that takes them.
    """
    bundles = Store(model_store)
    adapters, errors = _adapters(bundles, folders, _newest(bundles))
    rows = []
    for reference in _or_fail(bundles.references):
        try:
            manifest = bundles.manifest(reference)
            rows.append(_bundle_values(manifest))
        except StoreError as error:
            errors.append(str(error))
        own = [one for one in adapters if one.base.manifest.reference == reference]
        rows += map(_adapter_values, own)
    print_rows(rows if as_json else [*map(_row, rows)], as_json=as_json, right=("size",))
    if errors:
        fail("\ncloze: ".join(errors))


def _bundle_values(manifest: Manifest) -> dict[str, Any]:
    graphs = [manifest.graph, *(lower.graph for lower in manifest.lower_precisions())]
    return {
        "bundle": manifest.reference,
        "tasks": manifest.tasks,
        "precisions": [str(graph.precision) for graph in graphs],
        "family": manifest.architecture.family,
        "bytes": sum(file.size for file in manifest.files.values()),
        "exported": manifest.created.isoformat(timespec="seconds"),
    }


def _adapter_values(adapter: "AdapterBundle") -> dict[str, Any]:
    support = adapter.base.manifest.adapters
    return {
        "bundle": adapter.manifest.name,
        "tasks": adapter.manifest.tasks,
        "precisions": ["fp32", "int8"] if support is not None and support.int8 else ["fp32"],
        "family": adapter.manifest.architecture.family,
        "bytes": adapter.size,
        "base": adapter.base.manifest.reference,
    }


def _row(values: dict[str, Any]) -> Row:
    """Return the values as a table has them; an adapter is beneath the bundle that takes it."""
    row = dict(values)
    size = f"{row.pop('bytes') / 1e6:.1f} MB"
    if row.pop("base", None) is not None:
        row |= {"bundle": f"  {row['bundle']}", "exported": "adapter"}
    return row | {"size": size}


def _newest(bundles: Store) -> list[str]:
    """Return the names of all bundles, each of which stands for the newest version."""
    return [*dict.fromkeys(name.partition("@")[0] for name in _or_fail(bundles.references))]


def _adapters(
    bundles: Store, folders: Sequence[Path], names: Sequence[str]
) -> "tuple[list[AdapterBundle], list[str]]":
    """Return the adapters of named bundles, as a server reads them, and why others are refused."""
    if not folders:
        return [], []
    from cloze.service.errors import StartupError
    from cloze.service.models.adapters import open_adapters

    bases = [_or_fail(partial(bundles.open, name)) for name in names]
    try:
        opened = open_adapters(folders, bases, _MOST_ADAPTER_MB)
    except StartupError as error:
        fail(str(error))
    return opened.bundles, list(opened.refused.values())


@store.command()
@click.argument("reference", metavar="NAME[@VERSION]", shell_complete=complete_bundle)
@store_option
def show(reference: str, model_store: Path) -> None:
    """Print a bundle's manifest as JSON, and the names of its embedding spaces.

    The manifest has sizes, tasks, source, fused operators, the difference from torch, and what each
    rounded graph loses.
    """
    manifest = _or_fail(lambda: Store(model_store).manifest(reference))
    values = manifest.model_dump(mode="json")
    click.echo(json.dumps(values | {"embedding_spaces": _spaces(manifest)}, indent=2))


@store.command()
@click.argument(
    "references", metavar="[NAME[@VERSION]]...", nargs=-1, shell_complete=complete_bundle
)
@_adapter_option
@json_option
@store_option
def verify(
    references: tuple[str, ...], folders: tuple[Path, ...], as_json: bool, model_store: Path
) -> None:
    """Check every file of the named bundles, or of all bundles, against its manifest.

    With --adapter, check also the adapters. For a bundle with an int8 graph, measure what int8
    loses of each adapter: fp32 and int8 are compared on the texts of the export's quality gate. The
    command fails if an adapter loses more than an export may.
    """
    bundles = Store(model_store)
    rows, errors = [], []
    for reference in references or tuple(_or_fail(bundles.references)):
        try:
            rows.append({"bundle": bundles.open(reference).manifest.reference, "result": "ok"})
        except StoreError as error:
            errors.append(str(error))
    adapters, refused = _adapters(bundles, folders, references or _newest(bundles))
    errors += refused
    for adapter in adapters:
        result, problem = _verify_adapter(adapter)
        rows.append({"bundle": adapter.manifest.name, "result": result})
        errors += [problem] if problem else []
    print_rows(rows, as_json=as_json)
    if errors:
        fail("\ncloze: ".join(errors))


def _verify_adapter(adapter: "AdapterBundle") -> tuple[str, str]:
    """Return the result of an adapter's check, and what it loses too much; "" for nothing."""
    base = adapter.base.manifest
    if base.adapters is None or base.adapters.int8 is None:
        return "ok", ""
    try:
        from cloze.adapter_check import int8_figures
        from cloze.service.errors import StartupError
    except ModuleNotFoundError as error:
        fail(
            f"the check of adapters in int8 needs {error.name}; install it with: "
            f"{install_command('export')}"
        )
    try:
        figures, limits = int8_figures(adapter)
    except StartupError as error:
        fail(str(error))
    shown = ", ".join(f"{name} {value:.4f}" for name, value in figures.items())
    below = [name for name, value in figures.items() if not value >= limits[name]]  # NaN, too
    if not below:
        return f"ok; int8 beside fp32: {shown}", ""
    least = ", ".join(f"{name} must be at least {limits[name]}" for name in below)
    problem = f"int8 loses too much of {adapter.manifest.name}: {least}; serve it in fp32"
    return f"int8 beside fp32: {shown}", problem


@store.command()
@click.argument("reference", metavar="NAME[@VERSION]", shell_complete=complete_bundle)
@click.option("--yes", is_flag=True, help="Remove without asking; needed outside a terminal.")
@store_option
def remove(reference: str, yes: bool, model_store: Path) -> None:
    """Remove one version of a bundle, or all versions of NAME.

    A running server keeps a removed bundle in memory until it reloads or stops.
    """
    bundles = Store(model_store)
    removed = ", ".join(_or_fail(lambda: bundles.removable(reference)))
    if not yes:
        if not sys.stdin.isatty():
            fail(f"this would remove {removed} for good; confirm with --yes", code=2)
        click.confirm(f"Remove {removed} from {model_store} for good?", abort=True)
    _or_fail(lambda: bundles.remove(reference))
    click.echo(f"removed {removed}; a running server has it in memory until it reloads or stops")


def gates(manifest: Manifest) -> dict[str, Gate]:
    """Return the quality gates of a bundle's rounded graphs by precision."""
    gates = {str(manifest.graph.precision): manifest.gate}
    gates |= {str(lower.graph.precision): lower.gate for lower in manifest.lower_precisions()}
    return {precision: gate for precision, gate in gates.items() if gate is not None}


def measured(gate: Gate) -> str:
    """Return the figures of a quality gate."""
    return ", ".join(f"{name} {value:.4f}" for name, value in gate.measured.items())


def _spaces(manifest: Manifest) -> dict[str, dict[str, str | None]]:
    """Return the names of the spaces of a bundle's own vectors, by task and precision."""
    graphs = [manifest.graph, *(lower.graph for lower in manifest.lower_precisions())]
    precisions = [str(graph.precision) for graph in graphs]
    return {
        task: {name: embedding_space(manifest, name, recipe) for name in precisions}
        for task, recipe in own_recipes(manifest).items()
    }


def _or_fail(call: Callable[[], T]) -> T:
    """Return the result of a call; print a store error and exit with 1 if the call raises one."""
    try:
        return call()
    except StoreError as error:
        fail(str(error))
