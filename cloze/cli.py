"""The command line: ``cloze train | export | store | serve | ask | bench | doctor``.

Each command parses its options, calls one package and prints the result. A known error becomes one
line on standard error.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from cloze.ask import ask
from cloze.bench_command import bench
from cloze.doctor import doctor
from cloze.failing import fail
from cloze.model_sources import SourceError, bundles_to_serve
from cloze.model_store.heads import HEADS
from cloze.model_store.installation import DISTRIBUTION, install_command
from cloze.model_store.layouts import Layout
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import (
    NAME_PATTERN,
    Architecture,
    Embedding,
    Gate,
    Manifest,
    Parity,
    Precision,
    Weights,
)
from cloze.model_store.store import Bundle, Store, StoreError
from cloze.tables import Row, print_rows
from cloze.train import train

T = TypeVar("T")

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    cli.main(args=arguments, prog_name="cloze")


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name=DISTRIBUTION)
def cli() -> None:
    """Serve BERT and DistilBERT: fill-mask, embeddings, next sentence and question answering.

    `cloze train` makes a checkpoint from text. `cloze export` makes a bundle from a checkpoint, in
    a model store. `cloze store` lists, verifies and removes bundles. `cloze serve` answers requests
    from bundles over REST. `cloze ask` asks a server, or a model in this process. `cloze bench`
    measures the server. `cloze doctor` tells what this machine can do.

    Exit codes: 0 for success, 1 for an error, 2 for wrong arguments or a server that does not
    start. Shell completion for bash: eval "$(_CLOZE_COMPLETE=bash_source cloze)"; zsh and fish have
    zsh_source and fish_source.
    """


_store_option = click.option(
    "--model-store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_ROOT,
    envvar="CLOZE_MODEL_STORE",
    show_envvar=True,
    help="Folder that contains the bundles.",
)


def _check_name(_: click.Context, __: click.Parameter, value: str) -> str:
    if not re.fullmatch(NAME_PATTERN, value):
        raise click.BadParameter(
            "1 to 64 of letters, digits, '.', '_', '-', a letter or digit first"
        )
    return value


@cli.command()
@click.argument("source")
@click.option(
    "--name",
    required=True,
    callback=_check_name,
    help="Name of the bundle. The bundle gets the next version of this name.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=click.Choice([head.task for head in HEADS.values()]),
    help="Task to export; may be repeated.  [default: all tasks of the checkpoint's heads]",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice([str(p) for p in Precision]),
    help="Precision of an additional graph: int8 for a CPU, or fp16 for CUDA; may be repeated. "
    "Every bundle has an fp32 graph.",
)
@click.option(
    "--layout",
    type=click.Choice([str(layout) for layout in Layout]),
    help="Layout of a batch. The precision determines the layout: packed for fp16, dense for fp32 "
    "and int8. The option only checks that the layout is the expected one.",
)
@click.option(
    "--weights",
    type=click.Choice([str(w) for w in Weights]),
    default=str(Weights.FP32),
    help="Type of the matrices on disk. fp16 rounds the matrices and halves the size of the "
    "bundle. int8 needs --precision int8 and divides the size by four. The precision of the "
    "arithmetic does not change.",
)
@click.option(
    "--gate-pairs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="CSV file of sentence,sentence,score rows, as in STS-B; .xz is allowed. A rounded graph "
    "must rank the pairs as well as the checkpoint does. May be repeated.",
)
@click.option(
    "--revision",
    help="Branch, tag or commit of a hub id. The manifest records the commit.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Device for the comparison of an fp16 graph with torch: CUDA's kernels, or on a CPU a "
    "reference implementation of the graph's operators.",
)
@_store_option
def export(
    source: str,
    name: str,
    tasks: tuple[str, ...],
    precisions: tuple[str, ...],
    layout: str | None,
    weights: str,
    gate_pairs: tuple[Path, ...],
    revision: str | None,
    device: str,
    model_store: Path,
) -> None:
    """Turn a checkpoint into a bundle.

    SOURCE is a directory with config.json, weights (model.safetensors or pytorch_model.bin, in one
    file or sharded) and a tokenizer (tokenizer.json or vocab.txt); or a sentence-transformers
    directory; or a hub id such as google-bert/bert-base-uncased.

    The command publishes the bundle only if its graph agrees with torch over a grid of batch sizes
    and sequence lengths.

    \b
    Examples:
      cloze export ./my-bert --name my-bert
      cloze export google-bert/bert-base-uncased --name bert --revision main
    """
    try:
        from cloze.export.errors import DataError, ExportError
        from cloze.export.evaluation.pairs import read_pairs
        from cloze.export.graph.write import check_layout
        from cloze.export.publish import ExportOptions
        from cloze.export.publish import export as export_checkpoint
    except ModuleNotFoundError as error:
        fail(
            f"export needs {error.name}, which the serving install leaves out; install it with: "
            f"{install_command('export')}"
        )
    requested = tuple(Precision(precision) for precision in precisions)
    try:
        check_layout(requested, Layout(layout) if layout else None)
        options = ExportOptions(
            tasks=tasks,
            revision=revision,
            precisions=requested,
            weights=Weights(weights),
            pairs=tuple(read_pairs(list(gate_pairs))) if gate_pairs else (),
            cuda=device == "cuda",
        )
        bundle = export_checkpoint(source, name, Store(model_store), options, report=_report)
    except (ExportError, DataError, StoreError) as error:
        fail(str(error))
    _print_exported(bundle)


def _report(line: str) -> None:
    """Print a line about the progress of a command."""
    click.echo(line, err=True)


def _print_exported(bundle: Bundle) -> None:
    manifest = bundle.manifest
    worst = max(manifest.parity.max_error.values(), default=0.0)
    rounded = "" if manifest.graph.weights is Weights.FP32 else " of the same rounded weights"
    click.echo(
        f"{manifest.reference}: {', '.join(manifest.tasks)}; "
        f"differs from torch{rounded} by {worst:.1e} at most; in {bundle.path}"
    )
    for precision, gate in _gates(manifest).items():
        click.echo(f"{precision} beside the checkpoint: {_measured(gate)}")


cli.add_command(train)
cli.add_command(ask)
cli.add_command(bench)
cli.add_command(doctor)


@cli.group()
def store() -> None:
    """List, show, verify and remove the bundles of a model store."""


_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)


@store.command("list")
@_json_option
@_store_option
def list_bundles(as_json: bool, model_store: Path) -> None:
    """Print one line per bundle: name@version, tasks, precisions, family, size and date."""
    bundles = Store(model_store)
    rows, errors = [], []
    for reference in bundles.references():
        try:
            manifest = bundles.manifest(reference)
            rows.append(_bundle_values(manifest) if as_json else _bundle_row(manifest))
        except StoreError as error:
            errors.append(str(error))
    print_rows(rows, as_json=as_json, right=("size",))
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
        "exported": manifest.created.isoformat(),
    }


def _bundle_row(manifest: Manifest) -> Row:
    values = _bundle_values(manifest)
    size = values.pop("bytes")
    exported = f"{manifest.created:%Y-%m-%d %H:%M}, {_age(manifest.created)} ago"
    return values | {"size": f"{size / 1e6:.1f} MB", "exported": exported}


def _age(created: datetime) -> str:
    """Return the time since a date in its largest unit."""
    minutes = int((datetime.now(UTC) - created).total_seconds() // 60)
    for unit, length in (("days", 24 * 60), ("hours", 60)):
        if minutes >= 2 * length:
            return f"{minutes // length} {unit}"
    return f"{minutes} minutes"


@store.command()
@click.argument("reference", metavar="NAME[@VERSION]")
@click.option("--json", "as_json", is_flag=True, help="Print the whole manifest as JSON.")
@_store_option
def show(reference: str, as_json: bool, model_store: Path) -> None:
    """Print a bundle's manifest: sizes, tasks, source, operators and parity."""
    manifest = _or_fail(lambda: Store(model_store).manifest(reference))
    if as_json:
        click.echo(json.dumps(manifest.model_dump(mode="json"), indent=2))
    else:
        click.echo(_describe(manifest))


@store.command()
@click.argument("references", metavar="[NAME[@VERSION]]...", nargs=-1)
@_json_option
@_store_option
def verify(references: tuple[str, ...], as_json: bool, model_store: Path) -> None:
    """Check every file of the named bundles, or of all bundles, against its manifest."""
    bundles = Store(model_store)
    rows, errors = [], []
    for reference in references or bundles.references():
        try:
            rows.append({"bundle": bundles.open(reference).manifest.reference, "result": "ok"})
        except StoreError as error:
            errors.append(str(error))
    print_rows(rows, as_json=as_json)
    if errors:
        fail("\ncloze: ".join(errors))


@store.command()
@click.argument("reference", metavar="NAME[@VERSION]")
@_store_option
def remove(reference: str, model_store: Path) -> None:
    """Remove one version of a bundle, or all versions of NAME."""
    _or_fail(lambda: Store(model_store).remove(reference))
    click.echo(f"removed {reference}")


def _gates(manifest: Manifest) -> dict[str, Gate]:
    """Return the quality gates of a bundle's rounded graphs by precision."""
    gates = {str(manifest.graph.precision): manifest.gate}
    gates |= {str(lower.graph.precision): lower.gate for lower in manifest.lower_precisions()}
    return {precision: gate for precision, gate in gates.items() if gate is not None}


def _measured(gate: Gate) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in gate.measured.items())


def _describe(manifest: Manifest) -> str:
    """Return a table with one line per property of a bundle."""
    tokenizer, graph, source = manifest.tokenizer, manifest.graph, manifest.source
    case = "uncased" if tokenizer.lowercase else "cased"
    revision = f" at {source.revision}" if source.revision else ""
    lower = [f"{p.graph.layout}, {p.graph.precision}" for p in manifest.lower_precisions()]
    rows = {
        "bundle": f"{manifest.reference}, published {manifest.created:%Y-%m-%d %H:%M} UTC",
        "tasks": ", ".join(manifest.tasks),
        "model": _describe_architecture(manifest.architecture),
        "tokens": f"{manifest.limits.max_tokens} at most; "
        f"vocabulary of {tokenizer.vocab_size:,}, {case}",
        "source": f"{source.kind} {source.location}{revision}",
        "license": manifest.license or "not named by the source",
        "graph": f"{graph.layout}, {graph.precision}, weights {graph.weights} on disk, "
        f"opset {graph.opset}",
        "further": ", ".join(lower) or "none",
        "operators": ", ".join(f"{name} {count}" for name, count in graph.operators.items()),
        "parity": _describe_parity(manifest.parity),
        "files": ", ".join(f"{name} {file.size:,} bytes" for name, file in manifest.files.items()),
    }
    for precision, gate in _gates(manifest).items():
        rows[precision] = f"{_measured(gate)}, beside the checkpoint as it came"
    if manifest.embedding is not None:
        rows["embedding"] = _describe_embedding(manifest.embedding)
    return "\n".join(f"{title:<10} {text}" for title, text in rows.items())


def _describe_architecture(architecture: Architecture) -> str:
    return (
        f"{architecture.family}, {architecture.layers} layers x {architecture.hidden_size}, "
        f"{architecture.heads} heads, {architecture.parameters:,} parameters"
    )


def _describe_parity(parity: Parity) -> str:
    largest = ", ".join(f"{name} {error:.1e}" for name, error in parity.max_error.items())
    return f"{largest} (tolerance {parity.tolerance:.0e})"


def _describe_embedding(recipe: Embedding) -> str:
    scaled = "normalised" if recipe.normalize else "not normalised"
    prompts = f"; prompts {', '.join(recipe.prompts)}" if recipe.prompts else ""
    return (
        f"{recipe.dimensions} dimensions, {recipe.pooling} pooling, {scaled}, "
        f"{recipe.max_tokens} tokens{prompts}"
    )


_REPEATED = ("model", "default")
"""Settings whose option may be repeated."""


class _ServeCommand(click.Command):
    """A command with one option per setting; the settings class is imported at the first use."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options."""
        if not self.params:
            self.params = _setting_options()
        return super().get_params(ctx)


def _setting_options() -> list[click.Parameter]:
    from cloze.service.settings import ENV_PREFIX, Settings

    options: list[click.Parameter] = []
    for name, field in Settings.model_fields.items():
        description = field.description or ""
        default = f"; default: {getattr(field.default, 'value', field.default)}"
        if name in _REPEATED:  # the description names the default
            default = ""
        option = click.Option(
            [f"--{name.replace('_', '-')}"],
            help=f"{description[:1].upper()}{description[1:]}."
            f"  [env: {ENV_PREFIX}{name.upper()}{default}]",
            multiple=name in _REPEATED,
            show_default=False,
        )
        options.append(option)
    return options


@cli.command(cls=_ServeCommand)
def serve(**flags: Any) -> None:
    """Answer requests from bundles over REST.

    The server opens the newest version of every bundle in the model store, or the bundles that
    --model names. A model may also be a directory (./path) or a repository (hub:org/name@revision),
    which is exported at its first use. The field "model" of a request selects a bundle. A request
    without this field is answered by the default model of its task.

    The exit code is 0 after SIGTERM, when all accepted requests are answered; 1 if an engine dies;
    and 2 if the server cannot start.
    """
    try:
        from cloze.service.core import StartupError
        from cloze.service.serve import serve as serve_forever
        from cloze.service.settings import load_settings
    except ModuleNotFoundError as error:
        fail(f"serve needs {error.name}, which is not installed", code=2)
    try:
        settings = load_settings({**flags, **{name: flags[name] or None for name in _REPEATED}})
        models = bundles_to_serve(settings, _report)
        sys.exit(serve_forever(settings.model_copy(update={"model": models})))
    except (StartupError, SourceError) as error:
        fail(str(error), code=2)


def _or_fail(call: Callable[[], T]) -> T:
    """Return the result of a call; print a store error and exit with 1 if the call raises one."""
    try:
        return call()
    except StoreError as error:
        fail(str(error))
