"""The command line: ``cloze train | export | audit | store | serve | ask | bulk | bench | ...``.

Each command parses its options, calls one package and prints the result. A known error becomes one
line on standard error.
"""

import gc
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from cloze.ask import ask
from cloze.audit_command import audit
from cloze.bulk_command import bulk
from cloze.doctor import doctor
from cloze.failing import fail
from cloze.fetch_command import fetch
from cloze.keys_command import keys
from cloze.model_sources import SourceError, bundles_to_serve, offered
from cloze.model_store.heads import HEADS
from cloze.model_store.heads.sequence_classification import RERANK
from cloze.model_store.installation import build, install_command
from cloze.model_store.manifest import NAME_PATTERN, Precision, Weights
from cloze.model_store.store import Bundle, Store, StoreError
from cloze.options import CONTEXT, complete_bundle, json_option, store_option
from cloze.store_command import gates, measured, store
from cloze.tables import report
from cloze.train import train

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        cli.main(args=arguments, prog_name="cloze")
    finally:
        if "obstore" in sys.modules:
            _end_at_once()


def _end_at_once() -> None:
    """End the process without taking the interpreter apart.

    Threads of obstore's runtime go on, and one that calls Python meanwhile aborts the process:
    seen once in many failed downloads, as exit code -6 instead of 1.
    """
    end = sys.exception()
    if isinstance(end, SystemExit) and (end.code is None or isinstance(end.code, int)):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


def _print_version(context: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        click.echo(f"cloze, version {build()}")
        context.exit()


@click.group(context_settings=CONTEXT)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and the git revision, and exit.",
)
def cli() -> None:
    """Serve BERT and its kin: vectors, masks, labels, entities, answers and rankings.

    `cloze train` makes a checkpoint from text. `cloze export` makes a bundle from a checkpoint, in
    a model store. `cloze fetch` puts a model from an address into a model store. `cloze store`
    lists, verifies and removes bundles. `cloze serve` answers requests from bundles over REST.
    `cloze ask` asks a server, or a model in this process. `cloze bulk` runs a task on the texts of
    large files. `cloze bench` measures the server, `cloze audit` the bias of a model.
    `cloze doctor` prints what this machine can do.

    Exit codes: 0 for success, 1 for an error, 2 for wrong arguments or a server that does not
    start, 3 for results of `cloze bulk` that are complete, but in which rows have errors. Shell
    completion for bash: eval "$(_CLOZE_COMPLETE=bash_source cloze)"; zsh and fish have zsh_source
    and fish_source.
    """


def _check_name(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(NAME_PATTERN, value):
        raise click.BadParameter(
            "1 to 64 of letters, digits, '.', '_', '-', a letter or digit first"
        )
    return value


_OPTIONS_OF_A_HEAD = frozenset({"source", "share", "out", "tasks", "model_store"})
"""Parameters of `export` that --share reads."""


@cli.command()
@click.argument("source")
@click.option(
    "--name",
    callback=_check_name,
    help="Name of the bundle. The bundle gets the next version of this name.",
)
@click.option(
    "--share",
    metavar="NAME[@VERSION]",
    help="Write no bundle but only the head, for the encoder of this bundle, or of any bundle of "
    "the store (auto). Needs --out.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="With --share: the folder of the head, in the layout of a PEFT adapter.",
)
@click.option(
    "--task",
    "tasks",
    multiple=True,
    type=click.Choice([*(head.task for head in HEADS.values()), RERANK]),
    help="Task to export; may be repeated. rerank is text-classification whose second of two "
    "labels is the relevance of a text.  [default: all tasks of the checkpoint's heads]",
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
    "--weights",
    type=click.Choice([str(w) for w in Weights]),
    default=str(Weights.FP32),
    help="Type of the matrices on disk. fp16 rounds the matrices and halves the size of the "
    "bundle. int8 needs --precision int8 and divides the size by four. The precision of the "
    "arithmetic does not change.",
)
@click.option(
    "--adapters",
    metavar="LAYERS",
    default="",
    show_default=False,
    help="Linear layers that adapters of `cloze serve --adapter` may change: names like PEFT's "
    "target_modules, separated by commas, for example query,value; or all-linear. The bundle gets "
    "a second graph on the same weights.  [default: the bundle takes no adapters]",
)
@click.option(
    "--no-answer-threshold",
    type=float,
    default=0.0,
    help="Question answering says that there is no answer where its score exceeds that of the best "
    "span by more than this number of logits, qa_best_threshold of `cloze train evaluate`.",
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
    "--backbone",
    help="Directory or hub id with config.json and tokenizer of the encoder of a GLiNER whose "
    "folder lacks them. The default is the name in its gliner_config.json.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="Device for the comparison of an fp16 graph with torch: CUDA's kernels, or on a CPU a "
    "reference implementation of the graph's operators.",
)
@click.option(
    "--again",
    is_flag=True,
    help="Write a new version, even if the newest one is of the same checkpoint and options.",
)
@json_option
@store_option
def export(
    source: str,
    name: str | None,
    share: str | None,
    out: Path | None,
    tasks: tuple[str, ...],
    precisions: tuple[str, ...],
    weights: str,
    adapters: str,
    no_answer_threshold: float,
    gate_pairs: tuple[Path, ...],
    revision: str | None,
    backbone: str | None,
    device: str,
    again: bool,
    as_json: bool,
    model_store: Path,
) -> None:
    """Turn a checkpoint into a bundle.

    SOURCE is a directory with config.json, weights (model.safetensors or pytorch_model.bin, in one
    file or sharded) and a tokenizer (tokenizer.json, vocab.txt, vocab.json with merges.txt, or a
    SentencePiece model); or a sentence-transformers directory; or a hub id such as
    google-bert/bert-base-uncased.

    The command publishes the bundle only if its graph agrees with torch over a grid of batch sizes
    and sequence lengths. If the newest bundle of this name is of the same checkpoint and options,
    the command says so and writes nothing.

    \b
    Examples:
      cloze export ./my-bert --name my-bert
      cloze export google-bert/bert-base-uncased --name bert --revision main
      cloze export ./my-labels --share auto --out my-labels-head
    """
    if (name is None) == (share is None) or (share is None) != (out is None):
        raise click.UsageError("give --name for a bundle, or --share and --out for a head alone")
    if share is not None:
        _check_shared(click.get_current_context(), tasks)
    try:
        from cloze.export.errors import DataError, ExportError
        from cloze.export.measure.pairs import read_pairs
        from cloze.export.publish import ExportOptions
        from cloze.export.publish import export as export_checkpoint
    except ModuleNotFoundError as error:
        fail(
            f"export needs {error.name}, which the serving install leaves out; install it with: "
            f"{install_command('export')}"
        )
    try:
        if share is not None and out is not None:
            _share(source, share, Store(model_store), out, tasks[0] if tasks else None)
            return
        assert name is not None
        options = ExportOptions(
            tasks=tasks,
            revision=revision,
            precisions=tuple(map(Precision, precisions)),
            weights=Weights(weights),
            pairs=tuple(read_pairs(list(gate_pairs))) if gate_pairs else (),
            cuda=device == "cuda",
            reuse=not again,
            adapters=tuple(filter(None, adapters.split(","))),
            no_answer_threshold=no_answer_threshold,
            backbone=backbone,
        )
        bundle = export_checkpoint(source, name, Store(model_store), options, report=report)
    except (ExportError, DataError, StoreError) as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(bundle.manifest.model_dump(mode="json")))
    else:
        _print_exported(bundle)


def _check_shared(context: click.Context, tasks: tuple[str, ...]) -> None:
    """Raise if an option was given that changes nothing of a head alone."""
    if len(tasks) > 1:
        raise click.UsageError("--share writes one head: give --task once")
    ignored = [
        option.opts[0]
        for option in context.command.params
        if option.name not in _OPTIONS_OF_A_HEAD
        and context.get_parameter_source(str(option.name)) is not ParameterSource.DEFAULT
    ]
    if ignored:
        raise click.UsageError(
            f"--share writes a head and no graph: leave out {', '.join(ignored)}"
        )


def _share(source: str, base: str, store: Store, out: Path, task: str | None) -> None:
    from cloze.export.share import share

    done = share(source, base, store, out, task=task, report=report)
    click.echo(
        f"{out}: {done.task}, {done.size / 1e6:.2f} MB; the encoder is that of {done.bundle}, "
        f"which saves {done.saved / 1e6:.1f} MB"
    )


def _print_exported(bundle: Bundle) -> None:
    manifest = bundle.manifest
    worst = max(manifest.parity.max_error.values(), default=0.0)
    rounded = "" if manifest.graph.weights is Weights.FP32 else " of the same rounded weights"
    click.echo(
        f"{manifest.reference} differs from torch{rounded} by {worst:.1e} at most; in {bundle.path}"
    )
    for precision, gate in gates(manifest).items():
        click.echo(f"{precision} beside the checkpoint: {measured(gate)}")
    click.echo(f"{manifest.reference} offers {offered(manifest)}")


class _Bench(click.Group):
    """A group whose commands are imported at the first use: a serving image has no `bench`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command."""
        self._import()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands."""
        self._import()
        return super().list_commands(ctx)

    def _import(self) -> None:
        try:
            from cloze.bench.command import COMMANDS
        except ModuleNotFoundError as error:
            fail(f"bench needs {error.name}; install it with: {install_command('bench')}")
        self.commands = COMMANDS


@click.group(cls=_Bench)
def bench() -> None:
    """Measure the engine alone, the server, and other servers, in turns in one run."""


cli.add_command(audit)
cli.add_command(train)
cli.add_command(ask)
cli.add_command(bulk)
cli.add_command(bench)
cli.add_command(doctor)
cli.add_command(fetch)
cli.add_command(keys)
cli.add_command(store)


_REPEATED = (
    "model", "default", "alias", "adapter", "cors_origins", "allowed_hosts", "trusted_proxies",
)  # fmt: skip
"""Settings whose option may be repeated."""


class _ServeCommand(click.Command):
    """A command with one option per setting; the settings class is imported at the first use."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options."""
        if not self.params:
            self.params = _setting_options()
        return super().get_params(ctx)


def _setting_options() -> list[click.Parameter]:
    from cloze.service.settings import ENV_PREFIX, Settings, description

    options: list[click.Parameter] = []
    for name, field in Settings.model_fields.items():
        text = description(name)
        default = f"; default: {getattr(field.default, 'value', field.default)}"
        if name in _REPEATED or field.default is None:  # the description names the default
            default = ""
        option = click.Option(
            [f"--{name.replace('_', '-')}"],
            help=f"{text[:1].upper()}{text[1:]}.  [env: {ENV_PREFIX}{name.upper()}{default}]",
            multiple=name in _REPEATED,
            show_default=False,
            shell_complete=complete_bundle if name in ("model", "default") else None,
        )
        options.append(option)
    return options


@cli.command(cls=_ServeCommand)
def serve(**flags: Any) -> None:
    """Answer requests from bundles over REST.

    The server opens the newest version of every bundle in the model store, or the bundles that
    --model names. A model may also be a directory (./path) or a repository (hub:org/name@revision),
    which is exported at its first use, or an address, which is fetched (see `cloze fetch`). The
    field "model" of a request selects a bundle. A request without this field is answered by the
    default model of its task.

    The exit code is 0 after SIGTERM, when all accepted requests are answered; 1 if an engine dies;
    and 2 if the server cannot start.
    """
    try:
        from cloze.service.errors import StartupError
        from cloze.service.models.served_models import onnx_engine, open_bundles
        from cloze.service.server.listen import check_port
        from cloze.service.server.startup import (
            begin,
            memory_problem,
            open_early,
            warn_of_unknown_variables,
        )
        from cloze.service.settings import load_settings

        settings = load_settings({**flags, **{name: flags[name] or None for name in _REPEATED}})
        check_port(settings)
        models = bundles_to_serve(settings, report)
        settings = settings.model_copy(update={"model": models})
        if settings.frontends or settings.gpus > 1:
            from cloze.service.processes.supervisor import supervise  # which needs msgspec

            sys.exit(supervise(settings))
        begin(settings)
        warn_of_unknown_variables()
        gc.disable()  # what the start makes stays; `answer_http` enables it again
        make_engine = onnx_engine(settings)  # imports what both threads need
        bundles = open_bundles(settings).bundles
        importing = ThreadPoolExecutor(1).submit(import_module, "cloze.service.server.process")
        engines = open_early(settings, bundles, make_engine)
        importing.result()
        from cloze.service.server.process import serve_in_one_process

        sys.exit(serve_in_one_process(settings, engines, bundles=bundles))
    except ModuleNotFoundError as error:
        fail(f"serve needs {error.name}, which is not installed", code=2)
    except Exception as error:
        if (problem := memory_problem(error)) is not None:
            fail(problem, code=2)
        if not isinstance(error, StartupError | SourceError):
            raise
        fail(str(error), code=2)
