"""``cloze train | export | store | serve | bench``: parses arguments, calls one room, prints; errors become one line."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from cloze.bench import bench
from cloze.failing import fail
from cloze.train import train
from model_store.heads import HEADS
from model_store.layouts import Layout
from model_store.locations import DEFAULT_ROOT
from model_store.manifest import NAME_PATTERN, Gate, Manifest, Precision, Weights
from model_store.store import Store, StoreError

T = TypeVar("T")

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    cli.main(args=arguments, prog_name="cloze")


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name="cloze")
def cli() -> None:
    """Serve BERT and DistilBERT: fill-mask, embeddings, next sentence and question answering.

    Text becomes a checkpoint by `cloze train`; a checkpoint becomes a bundle by `cloze export`; bundles lie in a model
    store, which `cloze store` looks after; `cloze serve` answers from them over REST.
    """


_store_option = click.option(
    "--model-store",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_ROOT,
    envvar="CLOZE_MODEL_STORE",
    show_envvar=True,
    help="Folder of the bundles.",
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
    help="The bundle's name; it gets the name's next version.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=click.Choice([head.task for head in HEADS.values()]),
    help="What to export it for; may be repeated. [default: all that its heads allow]",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice([str(p) for p in Precision]),
    help="Arithmetic of a further graph beside the fp32 one: int8 for a CPU, fp16 for CUDA; may be repeated.",
)
@click.option(
    "--layout",
    type=click.Choice([str(layout) for layout in Layout]),
    help="How a batch lies in memory; it follows from the precision: fp16 is packed, fp32 and int8 are dense.",
)
@click.option(
    "--weights",
    type=click.Choice([str(w) for w in Weights]),
    default=str(Weights.FP32),
    help="How matrices lie on disk; fp16 rounds them and halves the bundle, int8, with --precision int8, quarters it. "
    "Arithmetic stays the precision's.",
)
@click.option(
    "--gate-pairs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="CSV of sentence,sentence,score (STS-B), also .xz: int8 must rank them as well as the checkpoint does.",
)
@click.option(
    "--revision",
    help="Branch, tag or commit of a hub id; the commit it names is pinned and recorded.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Where an fp16 graph is compared with torch: as CUDA's kernels run it, or, without a GPU, by what its operators mean.",
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

    SOURCE is a directory with config.json, weights (model.safetensors or pytorch_model.bin, whole or sharded) and a
    tokenizer (tokenizer.json or vocab.txt); a sentence-transformers directory; or a hub id such as
    google-bert/bert-base-uncased.

    The bundle is published only if its graph agrees with torch over a grid of batches and lengths.

    \b
    Examples:
      cloze export ./my-bert --name my-bert
      cloze export google-bert/bert-base-uncased --name bert --revision 86b5e0934494bd15c9632b12f734a8a67f723594
    """
    try:
        from export.errors import DataError, ExportError
        from export.evaluation.pairs import read_pairs
        from export.graph.write import check_layout
        from export.publish import ExportOptions
        from export.publish import export as export_checkpoint
    except ModuleNotFoundError as error:
        fail(
            f"export needs {error.name}, which the serving install leaves out; install cloze[cpu,export]"
        )
    asked = [Precision(precision) for precision in precisions]
    try:
        check_layout(asked, Layout(layout) if layout else None)
        bundle = export_checkpoint(
            source,
            name,
            Store(model_store),
            ExportOptions(
                tasks=tasks,
                revision=revision,
                precisions=tuple(asked),
                weights=Weights(weights),
                pairs=tuple(read_pairs(list(gate_pairs))) if gate_pairs else (),
                cuda=device == "cuda",
            ),
            report=lambda line: click.echo(line, err=True),
        )
    except (ExportError, DataError, StoreError) as error:
        fail(str(error))
    manifest = bundle.manifest
    worst = max(manifest.parity.max_error.values(), default=0.0)
    rounded = "" if manifest.graph.weights is Weights.FP32 else " of the same rounded weights"
    click.echo(
        f"{manifest.reference}: {', '.join(manifest.tasks)}; differs from torch{rounded} by {worst:.1e} at most; in {bundle.path}"
    )
    for title, gate in _gates(manifest).items():
        click.echo(f"{title} beside the checkpoint: {_measured(gate)}")


cli.add_command(train)
cli.add_command(bench)


@cli.group()
def store() -> None:
    """Look after the model store: list, show, verify, remove."""


@store.command("list")
@_store_option
def list_bundles(model_store: Path) -> None:
    """One line a bundle: name@version, tasks, size, date."""
    there = Store(model_store)

    def line(reference: str) -> str:
        manifest = there.manifest(reference)
        size = sum(file.size for file in manifest.files.values())
        return (
            f"{manifest.reference:<32} {', '.join(manifest.tasks):<28} {manifest.architecture.family:<11}"
            f" {size / 1e6:8.1f} MB  {manifest.created:%Y-%m-%d %H:%M}"
        )

    _for_each(there.references(), line)


@store.command()
@click.argument("reference", metavar="NAME[@VERSION]")
@click.option("--json", "as_json", is_flag=True, help="The whole manifest.")
@_store_option
def show(reference: str, as_json: bool, model_store: Path) -> None:
    """What a bundle promises: sizes, tasks, source, fused operators, parity."""
    manifest = _or_fail(lambda: Store(model_store).manifest(reference))
    click.echo(
        json.dumps(manifest.model_dump(mode="json"), indent=2) if as_json else _describe(manifest)
    )


@store.command()
@click.argument("references", metavar="[NAME[@VERSION]]...", nargs=-1)
@_store_option
def verify(references: tuple[str, ...], model_store: Path) -> None:
    """Check every file of bundles against its manifest; without a name, of all."""
    there = Store(model_store)
    _for_each(
        references or there.references(),
        lambda reference: f"{there.open(reference).manifest.reference}: ok",
    )


@store.command()
@click.argument("reference", metavar="NAME[@VERSION]")
@_store_option
def remove(reference: str, model_store: Path) -> None:
    """Remove one version, or all versions of a bare name."""
    _or_fail(lambda: Store(model_store).remove(reference))
    click.echo(f"removed {reference}")


def _gates(manifest: Manifest) -> dict[str, Gate]:
    """Of the graphs that something was rounded for, by precision."""
    gates = {str(manifest.graph.precision): manifest.gate}
    gates |= {str(lower.graph.precision): lower.gate for lower in manifest.lower()}
    return {precision: gate for precision, gate in gates.items() if gate is not None}


def _measured(gate: Gate) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in gate.measured.items())


def _describe(manifest: Manifest) -> str:
    sizes, source, graph, parity = (
        manifest.architecture,
        manifest.source,
        manifest.graph,
        manifest.parity,
    )
    case = "uncased" if manifest.tokenizer.lowercase else "cased"
    lines = {
        "bundle": f"{manifest.reference}, published {manifest.created:%Y-%m-%d %H:%M} UTC",
        "tasks": ", ".join(manifest.tasks),
        "model": f"{sizes.family}, {sizes.layers} layers x {sizes.hidden_size}, {sizes.heads} heads, "
        f"{sizes.parameters:,} parameters",
        "tokens": f"{manifest.limits.max_tokens} at most; vocabulary of {manifest.tokenizer.vocab_size:,}, {case}",
        "source": f"{source.kind} {source.location}"
        + (f" at {source.revision}" if source.revision else ""),
        "license": manifest.license or "not named by the source",
        "graph": f"{graph.layout}, {graph.precision}, weights {graph.weights} on disk, opset {graph.opset}",
        "further": ", ".join(
            f"{lower.graph.layout}, {lower.graph.precision}" for lower in manifest.lower()
        )
        or "none",
        "operators": ", ".join(f"{name} {count}" for name, count in graph.operators.items()),
        "parity": ", ".join(f"{name} {error:.1e}" for name, error in parity.max_error.items())
        + f" (tolerance {parity.tolerance:.0e})",
        "files": ", ".join(f"{name} {file.size:,} bytes" for name, file in manifest.files.items()),
    }
    lines |= {
        title: f"{_measured(gate)}, beside the checkpoint as it came"
        for title, gate in _gates(manifest).items()
    }
    if (recipe := manifest.embedding) is not None:
        prompts = f"; prompts {', '.join(recipe.prompts)}" if recipe.prompts else ""
        scaled = "normalised" if recipe.normalize else "not normalised"
        lines["embedding"] = (
            f"{recipe.dimensions} dimensions, {recipe.pooling} pooling, {scaled}, {recipe.max_tokens} tokens{prompts}"
        )
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())


class _ServeCommand(click.Command):
    """Has a flag for every setting, made from the settings class when it is first looked at."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The flags."""
        if not self.params:
            self.params = _setting_flags()
        return super().get_params(ctx)


def _setting_flags() -> list[click.Parameter]:
    from service.settings import ENV_PREFIX, Settings

    flags: list[click.Parameter] = []
    for name, field in Settings.model_fields.items():
        description = field.description or ""
        default = str(getattr(field.default, "value", field.default) or "")
        shown = f"  [env: {ENV_PREFIX}{name.upper()}" + (
            f"; default: {default}]" if default else "]"
        )
        text = f"{description[:1].upper()}{description[1:]}." + shown
        flags.append(
            click.Option(
                [f"--{name.replace('_', '-')}"],
                help=text,
                multiple=name == "model",
                show_default=False,
            )
        )
    return flags


@cli.command(cls=_ServeCommand)
def serve(**flags: Any) -> None:
    """Answer requests from bundles over REST.

    Serves the newest version of every bundle in the store unless --model names some. A request says which one it
    means by its field "model"; without it the first that can do the task answers.

    Ends with 0 after SIGTERM once accepted requests are answered, with 1 if an engine dies, with 2 if it cannot start.
    """
    try:
        from service.core import StartupError
        from service.serve import serve as serve_forever
        from service.settings import load_settings
    except ModuleNotFoundError as error:
        fail(f"serve needs {error.name}, which is not installed", code=2)
    try:
        settings = load_settings({**flags, "model": flags["model"] or None})
        sys.exit(serve_forever(settings))
    except StartupError as error:
        fail(str(error), code=2)


def _for_each(references: Sequence[str], line: Callable[[str], str]) -> None:
    """Print a line for each bundle, or what is wrong with it; any that is wrong makes the exit code 1."""
    failed = False
    for reference in references:
        try:
            click.echo(line(reference))
        except StoreError as error:
            failed = True
            click.echo(f"cloze: {error}", err=True)
    if failed:
        sys.exit(1)


def _or_fail(call: Callable[[], T]) -> T:
    try:
        return call()
    except StoreError as error:
        fail(str(error))
