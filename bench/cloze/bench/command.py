"""The commands of ``cloze bench``; `cloze.cli` imports them at their first use."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from cloze.bench.compare import changed
from cloze.bench.compare import compare as compare_results
from cloze.bench.compare import table as differences_table
from cloze.bench.engines import ENGINES, EnginesPlan, measure_engines
from cloze.bench.errors import BenchError
from cloze.bench.machine import describe_machine, installed_versions
from cloze.bench.peers import BACKENDS, PEERS
from cloze.bench.pods import count_pods, read_mix
from cloze.bench.report import table
from cloze.bench.result import Result
from cloze.bench.run import Measured, Plan, measure
from cloze.bench.run_options import RunOptions, Selection
from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.model_store.manifest import Precision
from cloze.model_store.store import Store, StoreError
from cloze.options import json_option, store_option
from cloze.service.core import Device
from cloze.service.errors import StartupError
from cloze.service.machine import available_cpus
from cloze.tables import print_rows, report

if TYPE_CHECKING:
    from cloze.bench.device import DeviceFigures

_LOADS = ("clients", "pauses", "shares", "bulk", "seconds", "turns", "max_stolen")
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


def _several(
    number: "click.ParamType[Any]", *, or_none: bool = False
) -> Callable[..., tuple[Any, ...]]:
    """Return a parser of numbers with commas between them; "" stands for none if that may be."""

    def parse(context: click.Context, parameter: click.Parameter, value: str) -> tuple[Any, ...]:
        parts = [] if or_none and not value else value.split(",")
        return tuple(number.convert(part, parameter, context) for part in parts)

    return parse


_counts = _several(click.IntRange(min=1))
_amounts = _several(click.FloatRange(min=0, min_open=True), or_none=True)
_PATH = click.Path(path_type=Path)
_task_option = click.option("--task", type=click.Choice(["embed", "fill-mask"]), default="embed")
_seconds_option = click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Duration of each load."
)
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
@click.option("--count", type=click.IntRange(min=1), default=2000, help="Number of texts per set.")
@click.option(
    "--clients", default="1,32", callback=_counts, help="Clients, one closed loop per number."
)
@click.option(
    "--pauses",
    default="",
    callback=_amounts,
    help="Milliseconds between the requests of one client, one load per number, as in 50,300.",
)
@click.option(
    "--shares",
    default="0.3,0.5,0.7,0.9",
    callback=_amounts,
    help="Arrival rates of the open loops, as shares of the closed loop's rate; '' for none.",
)
@click.option(
    "--bulk/--no-bulk",
    default=True,
    help="Whether to measure single texts beside requests of 2,048.",
)
@click.option("--each", type=click.IntRange(min=1), default=1, help="Texts per request.")
@_seconds_option
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
    type=_PATH,
    help="Hugging Face directory with the bundle's weights, for the peers.",
)
@_out_option
@json_option
def run(out: Path | None, as_json: bool, each: int, **arguments: Any) -> None:
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
    _present(_measure_run(RunOptions(**arguments, peers=peers, plan=plan)), out, as_json=as_json)


@_command
@click.argument("mix", type=_PATH)
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
    type=_PATH,
    metavar="NAME.json",
    help="Result of `cloze bench run` with the texts of the mix, instead of a measurement.",
)
@click.option("--model", default="cloze-bert", help="Name of a bundle.")
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
    shares = read_mix(mix)
    _create(out)
    result = Result.from_json(measured) if measured else _measure_mix(shares, **arguments)
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
    shown = differences if every else changed(differences)
    if as_json or (shown and sys.stdout.isatty()):
        rows = [asdict(difference) for difference in shown]
        print_rows(rows, as_json=as_json, right=("before", "after", "change", "noise"))
    else:
        click.echo(differences_table(shown, compared=len(differences)), nl=False)


@_command
@click.option("--device", type=click.Choice(["cpu", "cuda"]), required=True)
@click.option(
    "--sizes",
    default="bert-base,bert-large,distilbert",
    help="Architectures with random weights; also tiny.",
)
@click.option(
    "--lengths",
    default="16,32,64,128,256,512",
    callback=_counts,
    help="Tokens per sequence.",
)
@click.option(
    "--batch-tokens",
    default="1024,2048,4096,8192,16384,32768",
    callback=_counts,
    help="Tokens per batch; all sequences of a batch have one length.",
)
@click.option(
    "--frontends",
    default="0,1,2,4,8,12",
    callback=_several(click.IntRange(min=0)),
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
def device(out: Path | None, as_json: bool, device: str, sizes: str, **arguments: Any) -> None:
    """Measure a device as a whole, with random weights.

    That is: engines of several sizes over sequence lengths and batch sizes, padded batches, torch
    on the same batches, and servers. The command has never run on a card.

    \b
    Example:
      cloze bench device --device cuda --out results/my-card
    """
    try:
        from cloze.bench.device import DevicePlan, gpu_name, measure_device
        from cloze.bench.sizes import SIZES
    except ModuleNotFoundError as error:
        command = install_command("bench", "export")
        fail(f"bench of a device needs {error.name}; install it with: {command}")
    if unknown := [name for name in sizes.split(",") if name not in SIZES]:
        raise click.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(SIZES)}", param_hint="--sizes"
        )
    plan = DevicePlan(Device(device), tuple(sizes.split(",")), **arguments)
    gpu = {"GPU": name} if (name := gpu_name(plan.device)) else {}
    texts = {"from": "random words", "lengths": "SQuAD 1.1's; short: those of search questions"}

    def result(figures: "DeviceFigures") -> Result:
        made = _result(
            f"{', '.join(plan.sizes)}, embed", {"Cloze": installed_versions()}, texts, figures
        )
        machine = gpu | made.machine
        return replace(made, machine=machine, cells=figures.cells, notes=figures.notes)

    _create(out)
    with TemporaryDirectory(prefix="cloze-bench-") as folder:
        figures = measure_device(
            plan, Path(folder), report, lambda figures: _write(result(figures), out)
        )
    _present(result(figures), out, as_json=as_json)
    if figures.failed:
        fail(f"failed: {'; '.join(figures.failed)}; the lines above and the notes have the reasons")


@_command
@click.argument("work", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", default="cloze-bert", help="Name of the bundle with these weights.")
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
@click.option("--threads", default="1,2", callback=_counts, help="Threads of each engine.")
@click.option("--batches", default="1,8,32", callback=_counts, help="Texts per batch.")
@click.option("--lengths", default="14,128,512", callback=_counts, help="Tokens per text.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="Turns of each engine.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=0.2,
    help="Least duration of the runs of one engine and shape in one turn.",
)
@click.option(
    "--pairs", type=_PATH, help="CSV file of scored sentence pairs (STS-B), for the quality."
)
@click.option("--out", type=_PATH, metavar="FILE", help="Write the table to FILE.")
def engines(out: Path | None, **arguments: Any) -> None:
    """Measure Cloze's graphs beside other engines on the same weights, in turns.

    WORK is a Hugging Face directory with the bundle's weights. What the engines make of the weights
    stays there. The others are onnxruntime with torch's export and with its dynamic int8, OpenVINO
    and CTranslate2. An engine that does not start is left out with the reason.

    \b
    Example:
      cloze bench engines my-bert/ --model my-bert --python engines/bin/python --pairs dev.csv
    """
    text = measure_engines(EnginesPlan(**arguments), report)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")


def _measure_run(options: RunOptions) -> Result:
    """Measure what the options select, and return the figures."""
    selection = Selection.of(options)
    open_first = next(iter(selection.engines.values()))
    figures, described = Measured(), {}
    for name, texts in selection.texts.items():
        lengths = open_first(texts.texts).lengths
        mean = sum(lengths) / len(lengths)
        described[name] = f"({texts.source}; {len(lengths)} of {mean:.1f} tokens on average)"
        engines = {title: partial(open_, texts.texts) for title, open_ in selection.engines.items()}
        plan = replace(options.plan, label=name if len(selection.texts) > 1 else "")
        measured = measure(engines, selection.servers, texts.texts, plan, report)
        figures.turns += measured.turns
        figures.starts += measured.starts
    store = Store(options.model_store)
    references = [store.manifest(name).reference for name in options.models]
    model = f"{', '.join(references)}, {options.task}"
    return _result(model, selection.versions, described, figures)


def _measure_mix(mix: Mapping[str, float], *, model: str, seconds: float, **rest: Any) -> Result:
    """Measure a server with each kind of request of a mix for itself."""
    options = RunOptions(
        models=(model,),
        texts=tuple(mix),
        count=2000,
        precisions=("auto",),
        device="cpu",
        frontends=(0,),
        checkpoint=None,
        backends=(),
        peers={},
        plan=Plan(clients=(32,), shares=(0.7,), bulk=False, seconds=seconds, turns=1),
        **rest,
    )
    return _measure_run(options)


def _result(
    model: str,
    versions: Mapping[str, Mapping[str, str]],
    texts: dict[str, str],
    figures: "Measured | DeviceFigures",
) -> Result:
    """Return the figures with the command, the machine and the versions."""
    return Result(
        command=shlex.join(["cloze", *sys.argv[1:]]),
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M}",
        machine=describe_machine(available_cpus()),
        versions=versions,
        model=model,
        texts=texts,
        turns=figures.turns,
        starts=figures.starts,
    )


def _create(out: Path | None) -> None:
    """Create the folder and the JSON file, so that a wrong path fails before the measurement."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").touch()


def _write(result: Result, out: Path | None) -> None:
    if out is not None:
        Path(f"{out}.json").write_text(result.to_json())
        Path(f"{out}.md").write_text(table(result))


def _present(result: Result, out: Path | None, *, as_json: bool) -> None:
    click.echo(result.to_json() if as_json else table(result))
    _write(result, out)
