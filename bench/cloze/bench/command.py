"""The commands of ``cloze bench``; `cloze.cli` imports them at their first use."""

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from cloze.bench.compare import Verdict
from cloze.bench.compare import compare as compare_results
from cloze.bench.engines import ENGINES, EnginesPlan, measure_engines
from cloze.bench.errors import BenchError
from cloze.bench.peers import BACKENDS, PEERS
from cloze.bench.pods import count_pods, read_mix
from cloze.bench.report import table
from cloze.bench.result import Result
from cloze.bench.run import Plan
from cloze.bench.run_options import RunOptions, measure_run
from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.model_store.manifest import Precision
from cloze.model_store.store import StoreError
from cloze.options import json_option, store_option
from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.machine import available_cpus
from cloze.tables import print_rows

_LOADS = ("clients", "pauses", "shares", "bulk", "seconds", "turns")
"""Options of ``cloze bench run`` that are fields of a `Plan`."""

COMMANDS: dict[str, click.Command] = {}
"""The commands of the group ``cloze bench``, by name."""


def _command(command: Callable[..., None]) -> click.Command:
    """Make a command, which prints a known error as one line.

    Measured servers start without CLOZE_* variables, so the engine alone has none either.
    """

    @wraps(command)
    def run(**arguments: Any) -> None:
        for name in [name for name in os.environ if name.startswith("CLOZE_")]:
            if name != "CLOZE_MODEL_STORE":
                del os.environ[name]
        try:
            command(**arguments)
        except (BenchError, StoreError, StartupError, ValueError, OSError) as error:
            fail(str(error))

    made = click.command()(run)
    COMMANDS[str(made.name)] = made
    return made


_COUNT = click.IntRange(min=1)
_AMOUNT = click.FloatRange(min=0, min_open=True)
_PATH = click.Path(path_type=Path)


def _numbers(
    name: str,
    default: str,
    text: str,
    number: "click.ParamType[Any]" = _COUNT,
    *,
    or_none: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return an option of numbers with commas between them; "" stands for none if that may be."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Any, ...]:
        parts = [] if or_none and not value else value.split(",")
        return tuple(number.convert(part, parameter, context) for part in parts)

    return click.option(name, default=default, callback=parse, help=text)


_model_option = click.option("--model", default="cloze-bert", help="Name of a bundle.")
_task_option = click.option("--task", type=click.Choice(["embed", "fill-mask"]), default="embed")
_seconds_option = click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Duration of each load."
)
_FRONTENDS = "Front end processes, one server per number; 0: a single process."
_out_option = click.option("--out", type=_PATH, metavar="NAME", help="Write NAME.json and NAME.md.")


def _peer_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add an option per peer, whose value is the peer's interpreter."""
    for peer in reversed(PEERS):
        text = f"Interpreter of an environment with {peer.title}; needs --checkpoint."
        command = click.option(f"--{peer.option}", metavar="PYTHON", help=text)(command)
    return command


@_command
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("cloze-bert",),
    help="Name of a bundle; may be repeated, to compare bundles.",
)
@store_option
@_task_option
@click.option(
    "--texts",
    multiple=True,
    default=("mixed",),
    help="File with one text per line, or .jsonl (text or question); or random words: mixed, "
    "questions, passages. May be repeated, to measure short and long texts.",
)
@click.option("--count", type=_COUNT, default=2000, help="Number of texts per set.")
@_numbers("--clients", "1,32", "Clients, one closed loop per number.")
@_numbers(
    "--pauses",
    "",
    "Milliseconds between the requests of one client, one load per number, as in 50,300.",
    _AMOUNT,
    or_none=True,
)
@_numbers(
    "--shares",
    "0.3,0.5,0.7,0.9",
    "Arrival rates of the open loops, as shares of the closed loop's rate; '' for none.",
    _AMOUNT,
    or_none=True,
)
@click.option(
    "--bulk/--no-bulk",
    default=True,
    help="Whether to measure single texts beside requests of 2,048.",
)
@click.option("--each", type=_COUNT, default=1, help="Texts per request.")
@_seconds_option
@click.option("--turns", type=_COUNT, default=3, help="Number of repetitions.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice([*map(str, Precision), "auto"]),
    default=("auto",),
    help="Precision of engine and server; may be repeated, to compare.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="For engine and server."
)
@_numbers("--frontends", "0", _FRONTENDS, click.IntRange(min=0))
@_peer_options
@click.option(
    "--backend",
    "backends",
    multiple=True,
    type=click.Choice(BACKENDS),
    default=("torch",),
    help="Backend of sentence-transformers; may be repeated, to compare.",
)
@click.option(
    "--checkpoint",
    type=_PATH,
    help="Hugging Face directory with the bundle's weights, for the peers.",
)
@_out_option
def run(out: Path | None, each: int, **arguments: Any) -> None:
    """Measure and print a table; with --out, write the table, and the figures as JSON.

    \b
    Example:
      cloze bench run --model my-bert --texts my.jsonl --out results/my-bert
    """
    given = {peer.option: arguments.pop(peer.option.replace("-", "_")) for peer in PEERS}
    peers = {option: python for option, python in given.items() if python is not None}
    loads = {name: arguments.pop(name) for name in _LOADS}
    plan = Plan(**loads, texts_per_request=each)
    _create(out)
    result = measure_run(RunOptions(**arguments, peers=peers, plan=plan))
    click.echo(table(result))
    _write(result, out)


@_command
@click.argument("mix", type=_PATH)
@click.option("--rate", type=_AMOUNT, required=True, help="Requests per second.")
@click.option("--pod-cores", type=_AMOUNT, help="Cores of a pod.  [default: those of this machine]")
@click.option(
    "--measured",
    type=_PATH,
    metavar="NAME.json",
    help="Result of `cloze bench run` with the texts of the mix, instead of a measurement.",
)
@_model_option
@store_option
@_task_option
@_seconds_option
@_out_option
@json_option
def pods(
    mix: Path,
    rate: float,
    pod_cores: float | None,
    measured: Path | None,
    model: str,
    model_store: Path,
    task: str,
    seconds: float,
    out: Path | None,
    as_json: bool,
) -> None:
    """Print how many pods serve a mix of requests.

    MIX is a CSV file with the columns `texts` (a file beside it with one text per line; or
    questions, passages, mixed: random words) and `share`. Each kind is measured for itself, with 32
    clients. A pod runs at 70 % of its cores, and one pod more may be lost or replaced.

    \b
    Example:
      cloze bench pods mix.csv --rate 2000 --pod-cores 2
    """
    shares = read_mix(mix)
    _create(out)
    plan = Plan(clients=(32,), bulk=False, seconds=seconds, turns=1)
    options = RunOptions((model,), model_store, task, tuple(shares), plan)
    result = Result.from_json(measured) if measured else measure_run(options)
    needed = count_pods(result, shares, rate, pod_cores or available_cpus())
    _write(result, out)
    columns = ("share", "cpu_ms", "share x cpu_ms")
    rows = [asdict(kind) | {columns[-1]: kind.share * kind.cpu_ms} for kind in needed.kinds]
    if as_json:
        figures = {"cpu_ms": needed.cpu_ms, "cores": needed.cores, "pods": needed.pods}
        print_rows([{"kinds": rows} | figures], as_json=True)
    else:
        print_rows(rows, right=columns, headings=True)
        click.echo(str(needed))


@_command
@click.argument("before", type=_PATH)
@click.argument("after", type=_PATH)
@click.option("--all", "every", is_flag=True, help="List unchanged figures too.")
@json_option
def compare(before: Path, after: Path, every: bool, as_json: bool) -> None:
    """List the figures that changed from one result (JSON) to another.

    A change counts if it exceeds the differences between the turns of one result.
    """
    differences = compare_results(Result.from_json(before), Result.from_json(after))
    rows = [asdict(each) for each in differences if every or each.verdict is not Verdict.SAME]
    if rows or as_json:
        right = ("before", "after", "change", "noise")
        print_rows(rows, as_json=as_json, right=right, headings=True)
    else:
        same = f"{len(differences)} figures are the same within their turns' spread"
        click.echo(f"nothing moved: {same}")


@_command
@click.option("--device", type=click.Choice(["cpu", "cuda"]), required=True)
@click.option(
    "--sizes",
    default="bert-base,bert-large,distilbert",
    help="Architectures with random weights; also tiny.",
)
@_numbers("--lengths", "16,32,64,128,256,512", "Tokens per sequence.")
@_numbers(
    "--batch-tokens",
    "1024,2048,4096,8192,16384,32768",
    "Tokens per batch; all sequences of a batch have one length.",
)
@_numbers("--frontends", "0,1,2,4,8,12", _FRONTENDS, click.IntRange(min=0))
@click.option(
    "--sequences", type=_COUNT, default=1024, help="Number of sequences with SQuAD's lengths."
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
def device(out: Path | None, device: str, sizes: str, **arguments: Any) -> None:
    """Measure a device as a whole, with random weights.

    That is: engines of several sizes over sequence lengths and batch sizes, padded batches, torch
    on the same batches, and servers. The command has never run on a card.

    \b
    Example:
      cloze bench device --device cuda --out results/my-card
    """
    try:
        from cloze.bench.device import DevicePlan, measure_device
    except ModuleNotFoundError as error:
        command = install_command("bench", "export")
        fail(f"bench of a device needs {error.name}; install it with: {command}")
    plan = DevicePlan(Device(device), tuple(sizes.split(",")), **arguments)
    _create(out)
    with TemporaryDirectory(prefix="cloze-bench-") as folder:
        for result in measure_device(plan, Path(folder)):
            _write(result, out)
    click.echo(table(result))
    if result.failed:
        fail(f"failed: {'; '.join(result.failed)}; the notes have the reasons")


@_command
@click.argument("work", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_model_option
@store_option
@click.option(
    "--python",
    default=sys.executable,
    metavar="PYTHON",
    show_default="this one",
    help="Interpreter of an environment with the other engines.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(ENGINES),
    default=ENGINES,
    show_default="all",
    help="An engine to measure; may be repeated.",
)
@_numbers("--threads", "1,2", "Threads of each engine.")
@_numbers("--batches", "1,8,32", "Texts per batch.")
@_numbers("--lengths", "14,128,512", "Tokens per text.")
@click.option("--rounds", type=_COUNT, default=5, help="Turns of each engine.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=0.2,
    help="Least duration of the runs of one engine and shape in one turn.",
)
@click.option(
    "--pairs", type=_PATH, help="CSV file of scored sentence pairs (STS-B), for the quality."
)
def engines(**arguments: Any) -> None:
    """Print a table of Cloze's graphs beside other engines on the same weights, in turns.

    WORK is a Hugging Face directory with the weights of the bundle. What the engines make of the
    weights stays there. The others are onnxruntime with torch's export and with its dynamic int8,
    OpenVINO and CTranslate2. An engine that does not start is left out with the reason.

    \b
    Example:
      cloze bench engines my-bert/ --model my-bert --python engines/bin/python --pairs dev.csv
    """
    click.echo(measure_engines(EnginesPlan(**arguments)))


def _create(out: Path | None) -> None:
    """Create the folder and the JSON file, so that a wrong path fails before the measurement."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").touch()


def _write(result: Result, out: Path | None) -> None:
    if out is not None:
        Path(f"{out}.json").write_text(result.to_json())
        Path(f"{out}.md").write_text(table(result))
