"""``cloze bench``: parses arguments, calls `bench`, prints; docs/measurements.md has the method."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from cloze.bench.peers import PEERS
from cloze.bench.peers.sentence_transformers_peer import BACKENDS
from cloze.bench_output import create_out, present, write
from cloze.bench_results import device_result, measure_mix, measure_run
from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.model_store.manifest import Precision
from cloze.model_store.store import StoreError
from cloze.options import json_option, store_option
from cloze.tables import print_rows, report

_PROGRAMS = {"BINARY": "The program", "PYTHON": "Interpreter of an environment with"}
"""Begins the help text of a peer's option, by kind of program."""

_INSTALL = f"which the serving install leaves out; install it with: {install_command('bench')}"

_LOADS = ("clients", "pauses", "shares", "bulk", "seconds", "turns", "max_stolen")
"""Options of ``cloze bench run`` that are fields of a `Plan`."""

Command = TypeVar("Command", bound=Callable[..., Any])


def _peer_options(command: Command) -> Command:
    """Add an option per peer, whose value is the peer's program."""
    for peer in reversed(PEERS):
        option = click.option(
            f"--{peer.option}",
            metavar=peer.program,
            help=f"{_PROGRAMS[peer.program]} {peer.title}; needs --checkpoint.",
        )
        command = option(command)
    return command


_out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="NAME",
    help="Write NAME.json and NAME.md; `run` also writes NAME.png.",
)


def _numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    """Parse numbers above 0."""
    try:
        numbers = tuple(float(part) for part in value.split(",") if part)
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise click.BadParameter(f"numbers above 0 with commas between them, got {value!r}")
    return numbers


def _numbers_or_none(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[float, ...]:
    """Parse numbers above 0; "" stands for none."""
    return _numbers(context, parameter, value) if value else ()


def _counts(least: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """Return a parser of whole numbers from `least`."""

    def parse(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
        parts = value.split(",")
        if not all(part.strip().isdecimal() and int(part) >= least for part in parts):
            raise click.BadParameter(
                f"whole numbers from {least} with commas between them, got {value!r}"
            )
        return tuple(int(part) for part in parts)

    return parse


@click.group(invoke_without_command=True)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Measure this device as a whole; only without a command.",
)
@click.option(
    "--sizes",
    default="bert-base,bert-large,distilbert",
    help="Architectures with random weights; also tiny.",
)
@click.option(
    "--lengths",
    default="16,32,64,128,256,512",
    callback=_counts(1),
    help="Tokens per sequence.",
)
@click.option(
    "--batch-tokens",
    default="1024,2048,4096,8192,16384,32768",
    callback=_counts(1),
    help="Tokens per batch; all sequences of a batch have one length.",
)
@click.option(
    "--frontends",
    default="0,1,2,4,8,12",
    callback=_counts(0),
    help="Front end processes, one server per number; 0: a single process.",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=1024,
    help="Number of sequences with SQuAD's lengths.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=0.4,
    help="Duration per batch size; a server is measured ten times as long.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=8.0,
    help="Begin no further part after this time.",
)
@_out_option
@json_option
@click.pass_context
def bench(context: click.Context, /, out: Path | None, as_json: bool, **arguments: Any) -> None:
    """Measure the engine alone, the server, and its peers, in turns in one run.

    Without a command, --device measures a device: engines of several sizes over sequence lengths
    and batch sizes, padded batches, torch on the same batches, and servers, with random weights.

    \b
    Examples:
      cloze bench --device cuda --out results/my-card
      cloze bench run --model cloze-bert
    """
    # Measured servers start without CLOZE_* variables, so the engine alone has none either.
    for name in [name for name in os.environ if name.startswith("CLOZE_")]:
        if name != "CLOZE_MODEL_STORE":
            del os.environ[name]
    given = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if command := context.invoked_subcommand:
        if given:
            raise click.UsageError(
                f"option {given[0]} applies only without a command: "
                f"leave out '{command}', or give the option after '{command}'"
            )
    elif arguments["device"] is not None:
        _measure_device(arguments, out, as_json=as_json)
    elif given:
        raise click.UsageError(f"{given[0]} says how to measure a device; give --device as well")
    else:
        click.echo(context.get_help())


def _measure_device(arguments: dict[str, Any], out: Path | None, *, as_json: bool) -> None:
    try:
        from cloze.bench.device import DeviceFigures, DevicePlan, measure_device
        from cloze.bench.errors import BenchError
        from cloze.bench.machine import installed_versions
        from cloze.bench.sizes import SIZES
        from cloze.service.core import Device
    except ModuleNotFoundError as error:
        command = install_command("bench", "export")
        fail(f"bench of a device needs {error.name}; install it with: {command}")
    sizes = tuple(arguments["sizes"].split(","))
    if unknown := [name for name in sizes if name not in SIZES]:
        raise click.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(SIZES)}", param_hint="--sizes"
        )
    plan = DevicePlan(**arguments | {"device": Device(arguments["device"]), "sizes": sizes})
    describe = partial(device_result, plan, installed_versions())

    def save(figures: DeviceFigures) -> None:
        write(describe(figures), out)

    try:
        create_out(out)
        with TemporaryDirectory(prefix="cloze-bench-") as folder:
            figures = measure_device(plan, Path(folder), report, save)
    except (BenchError, OSError) as error:
        fail(str(error))
    present(describe(figures), out, as_json=as_json)
    if figures.failed:
        fail(f"failed: {'; '.join(figures.failed)}; the lines above and the notes have the reasons")


@bench.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("cloze-bert",),
    help="Name of a bundle; may be repeated, to compare bundles.",
)
@store_option
@click.option("--task", type=click.Choice(["embed", "fill-mask"]), default="embed")
@click.option(
    "--texts",
    multiple=True,
    default=("mixed",),
    help="File with one text per line, or .jsonl (text or question); or random words: mixed, "
    "questions, passages. May be repeated, to measure short and long texts.",
)
@click.option("--count", type=click.IntRange(min=1), default=2000, help="Number of texts per set.")
@click.option(
    "--clients", default="1,32", callback=_counts(1), help="Clients, one closed loop per number."
)
@click.option(
    "--pauses",
    default="",
    callback=_numbers_or_none,
    help="Milliseconds between the requests of one client, one load per number, as in 50,300.",
)
@click.option(
    "--shares",
    default="0.3,0.5,0.7,0.9",
    callback=_numbers_or_none,
    help="Arrival rates of the open loops, as shares of the closed loop's rate; '' for none.",
)
@click.option(
    "--arrivals",
    type=click.Path(path_type=Path),
    help="CSV of recorded arrival times (column timestamp).",
)
@click.option(
    "--bulk/--no-bulk",
    default=True,
    help="Whether to measure single texts beside requests of 2,048.",
)
@click.option("--each", type=click.IntRange(min=1), default=1, help="Texts per request.")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Duration of each load."
)
@click.option("--turns", type=click.IntRange(min=1), default=3, help="Number of repetitions.")
@click.option(
    "--max-stolen",
    type=click.FloatRange(min=0, max=1),
    default=1.0,
    help="Repeat a load, at most 3 times, while other guests of the host take more than this share "
    "of the processor time; the quietest run counts.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice([str(p) for p in Precision] + ["auto"]),
    default=("auto",),
    help="Precision of engine and server; may be repeated, to compare.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="For engine and server."
)
@click.option(
    "--frontends",
    multiple=True,
    type=click.IntRange(min=0),
    default=(0,),
    help="Front end processes of the server; may be repeated, to compare.",
)
@_peer_options
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(list(BACKENDS)),
    default=("torch",),
    help="Backend of sentence-transformers; may be repeated, to compare.",
)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    help="Hugging Face directory with the bundle's weights, for the peers.",
)
@_out_option
@json_option
def run(out: Path | None, as_json: bool, **arguments: Any) -> None:
    """Measure and print a table; with --out, write the table, the figures as JSON, and plots."""
    try:
        from cloze.bench.errors import BenchError
        from cloze.bench.run import Plan
        from cloze.bench.run_options import RunOptions, read_arrivals
        from cloze.service.errors import StartupError
    except ModuleNotFoundError as error:
        fail(f"bench needs {error.name}, {_INSTALL}")
    given = {peer.option: arguments.pop(peer.option.replace("-", "_")) for peer in PEERS}
    peers = {option: program for option, program in given.items() if program is not None}
    arrivals, each = arguments.pop("arrivals"), arguments.pop("each")
    loads = {name: arguments.pop(name) for name in _LOADS}
    try:
        times = read_arrivals(arrivals) if arrivals else None
        plan = Plan(**loads, arrivals=times, texts_per_request=each)
        options = RunOptions(**arguments, peers=peers, plan=plan)
        create_out(out)
        result = measure_run(options)
    except (BenchError, StoreError, StartupError, ValueError, OSError) as error:
        fail(str(error))
    present(result, out, as_json=as_json)


@bench.command()
@click.argument("mix", type=click.Path(path_type=Path))
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    required=True,
    help="Requests per second.",
)
@click.option(
    "--pod-cores",
    type=click.FloatRange(min=0, min_open=True),
    help="Cores of a pod.  [default: those of this machine]",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="NAME.json",
    help="Result of `cloze bench run` with the texts of the mix, instead of a measurement.",
)
@click.option("--model", default="cloze-bert", help="Name of a bundle.")
@store_option
@click.option("--task", type=click.Choice(["embed", "fill-mask"]), default="embed")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Duration of each load."
)
@_out_option
@json_option
def pods(
    mix: Path,
    rate: float,
    pod_cores: float | None,
    measured: Path | None,
    out: Path | None,
    as_json: bool,
    **arguments: Any,
) -> None:
    """Print how many pods serve a mix of requests.

    MIX is a CSV file with the columns `texts` (a file beside it with one text per line; or
    questions, passages, mixed: random words) and `share`. Each kind is measured for itself, with 32
    clients. A pod runs at 70 % of its cores, and one pod more may be lost or replaced.

    \b
    Example:
      cloze bench pods mix.csv --rate 2000 --pod-cores 2
    """
    try:
        from cloze.bench.errors import BenchError
        from cloze.bench.pods import count_pods, read_mix
        from cloze.bench.result import Result
        from cloze.service.errors import StartupError
        from cloze.service.settings import available_cpus
    except ModuleNotFoundError as error:
        fail(f"bench needs {error.name}, {_INSTALL}")
    try:
        shares = read_mix(mix)
        create_out(out)
        result = Result.from_json(measured) if measured else measure_mix(shares, **arguments)
        needed = count_pods(result, shares, rate, pod_cores or available_cpus())
    except (BenchError, StoreError, StartupError, ValueError, OSError) as error:
        fail(str(error))
    write(result, out)
    columns = ("share", "cpu_ms", "share x cpu_ms")
    rows = [asdict(kind) | {columns[-1]: kind.share * kind.cpu_ms} for kind in needed.kinds]
    if as_json:
        figures = {"cpu_ms": needed.cpu_ms, "cores": needed.cores, "pods": needed.pods}
        print_rows([{"kinds": rows} | figures], as_json=True)
    else:
        print_rows(rows, right=columns, headings=True)
        click.echo(str(needed))


@bench.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="List unchanged figures too.")
@json_option
def compare(before: Path, after: Path, every: bool, as_json: bool) -> None:
    """List the figures that changed from one result (JSON) to another.

    A change counts if it exceeds the differences between the turns of one result.
    """
    try:
        from cloze.bench.compare import changed, table
        from cloze.bench.compare import compare as compare_results
        from cloze.bench.result import Result
    except ModuleNotFoundError as error:
        fail(f"bench needs {error.name}, {_INSTALL}")
    try:
        differences = compare_results(Result.from_json(before), Result.from_json(after))
    except (OSError, ValueError) as error:
        fail(str(error))
    shown = differences if every else changed(differences)
    if as_json or (shown and sys.stdout.isatty()):
        rows = [asdict(difference) for difference in shown]
        print_rows(rows, as_json=as_json, right=("before", "after", "change", "noise"))
    else:
        click.echo(table(shown, compared=len(differences)), nl=False)
