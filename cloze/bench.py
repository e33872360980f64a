"""``cloze bench``: parses arguments, calls `bench`, prints. What is measured and how is told in docs/benchmark.md."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from cloze.failing import fail
from model_store.locations import DEFAULT_ROOT
from model_store.manifest import Precision
from model_store.store import Store, StoreError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bench.result import Result
    from bench.texts import Texts
    from service.core import RequestedPrecision
    from service.tasks import Task


_out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Where to write NAME.json and NAME.md, of `run` also NAME.png (give NAME).",
)


def _numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in value.split(",") if part)
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise click.BadParameter(f"numbers above 0 with commas between them, got {value!r}")
    return numbers


def _counts(least: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
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
    help="Measure all that it gives; with no command.",
)
@click.option(
    "--sizes",
    default="bert-base,bert-large,distilbert",
    help="Architectures, with random weights; also tiny.",
)
@click.option(
    "--lengths",
    default="16,32,64,128,256,512",
    callback=_counts(1),
    help="Of sequences, in tokens.",
)
@click.option(
    "--batch-tokens",
    default="1024,2048,4096,8192,16384,32768",
    callback=_counts(1),
    help="Of batches of one length each.",
)
@click.option(
    "--frontends",
    default="0,1,2,4,8,12",
    callback=_counts(0),
    help="Of servers, one each; 0: one process.",
)
@click.option("--sequences", type=click.IntRange(min=1), default=1024, help="Of SQuAD's lengths.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=0.4,
    help="Of each batch; of a server ten times that.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=8.0,
    help="After which nothing further begins.",
)
@_out_option
@click.pass_context
def bench(
    context: click.Context,
    device: str | None,
    sizes: str,
    lengths: tuple[int, ...],
    batch_tokens: tuple[int, ...],
    frontends: tuple[int, ...],
    sequences: int,
    seconds: float,
    minutes: float,
    out: Path | None,
) -> None:
    """Measure: the engine alone, the server, and its peers, in turns in one run.

    Without a command, --device says what to measure: engines of several sizes over lengths and sizes of batches, padded, torch
    on the same batches, and servers, with weights made up.

    \b
    Examples:
      cloze bench --device cuda --out results/my-card
      cloze bench run --model cloze-bert
    """
    for name in [
        name for name in os.environ if name.startswith("CLOZE_") and name != "CLOZE_MODEL_STORE"
    ]:
        del os.environ[
            name
        ]  # servers are started without them, so that the engine alone must not have them either
    given = [
        name
        for name in context.params
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if context.invoked_subcommand is not None:
        if given:
            raise click.UsageError(
                f"--{given[0].replace('_', '-')} before {context.invoked_subcommand} is of no command; leave one out"
            )
        return
    if device is None:
        if given:
            raise click.UsageError(
                f"--{given[0].replace('_', '-')} says how to measure a device; give --device as well"
            )
        click.echo(context.get_help())
        return
    try:
        from bench.device import Found, Programme, card, run_programme
        from bench.errors import BenchError
        from bench.result import Result, describe_machine, installed
        from bench.sizes import SIZES
        from service.core import Device
        from service.settings import available_cpus
    except ModuleNotFoundError as error:
        fail(f"bench of a device needs {error.name}; install cloze[bench,export] with cpu or gpu")
    names = tuple(sizes.split(","))
    if unknown := [name for name in names if name not in SIZES]:
        raise click.BadParameter(
            f"{unknown[0]!r} is none of {', '.join(SIZES)}", param_hint="--sizes"
        )
    programme = Programme(
        Device(device),
        sizes=names,
        lengths=lengths,
        batch_tokens=batch_tokens,
        frontends=frontends,
        sequences=sequences,
        seconds=seconds,
        minutes=minutes,
    )
    versions = {"Cloze": installed()}

    def result(found: Found) -> Result:
        gpu = {"GPU": name} if (name := card(programme.device)) else {}
        return Result(
            command=shlex.join(["cloze", *sys.argv[1:]]),
            date=_now(),
            machine=gpu | describe_machine(available_cpus()),
            versions=versions,
            model=", ".join(names) + f", embed, on {gpu.get('GPU', 'a CPU')}",
            texts={
                "from": "random words",
                "lengths": "SQuAD 1.1's; short: search questions' mostly",
            },
            turns=found.turns,
            starts=found.starts,
            cells=found.cells,
            notes=found.notes,
        )

    try:
        _open_out(out)
        with TemporaryDirectory(prefix="cloze-bench-") as folder:
            found = run_programme(
                programme,
                Path(folder),
                lambda line: click.echo(line, err=True),
                lambda found: _write(result(found), out),
            )
    except (BenchError, OSError) as error:
        fail(str(error))
    _tell(result(found), out)
    if found.failed:
        fail(f"failed: {'; '.join(found.failed)}; why is said above, and among the notes")


@bench.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    default=("cloze-bert",),
    help="A bundle; may be repeated, to compare two.",
)
@click.option(
    "--model-store",
    type=click.Path(path_type=Path),
    default=DEFAULT_ROOT,
    envvar="CLOZE_MODEL_STORE",
    help="Its folder.",
)
@click.option("--task", type=click.Choice(["embed", "fill-mask"]), default="embed")
@click.option(
    "--texts",
    type=click.Path(path_type=Path),
    help="A text a line, or .jsonl (text or question); unless given, made up.",
)
@click.option("--count", type=click.IntRange(min=1), default=2000, help="How many texts.")
@click.option("--clients", default="1,32", callback=_numbers, help="Of the closed loops.")
@click.option(
    "--shares",
    default="0.3,0.5,0.7,0.9",
    callback=_numbers,
    help="Of the open loops, of what the closed loop gave.",
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
@click.option("--each", type=click.IntRange(min=1), default=1, help="Texts a request.")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, help="Of each load.")
@click.option("--turns", type=click.IntRange(min=1), default=3)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice([str(p) for p in Precision] + ["auto"]),
    default=("auto",),
    help="Of engine and server; may be repeated, to compare.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Of engine and server."
)
@click.option(
    "--frontends",
    multiple=True,
    type=click.IntRange(min=0),
    default=(0,),
    help="Of the server; may be repeated, to compare.",
)
@click.option(
    "--infinity",
    metavar="PYTHON",
    help="Interpreter of an environment with infinity-emb; needs --checkpoint.",
)
@click.option(
    "--pipeline",
    metavar="PYTHON",
    help="Interpreter of an environment with transformers and FastAPI; needs --checkpoint.",
)
@click.option(
    "--checkpoint", type=click.Path(path_type=Path), help="The bundle's weights as peers read them."
)
@_out_option
def run(
    models: tuple[str, ...],
    model_store: Path,
    task: str,
    texts: Path | None,
    count: int,
    clients: tuple[float, ...],
    shares: tuple[float, ...],
    arrivals: Path | None,
    bulk: bool,
    each: int,
    seconds: float,
    turns: int,
    precisions: tuple[str, ...],
    device: str,
    frontends: tuple[int, ...],
    infinity: str | None,
    pipeline: str | None,
    checkpoint: Path | None,
    out: Path | None,
) -> None:
    """Measure and print a table; with --out, write it, the figures as JSON, and plots."""
    try:
        from bench import subjects
        from bench.errors import BenchError
        from bench.result import Result, describe_machine, installed
        from bench.run import Plan, measure
        from service.core import Device, StartupError
        from service.settings import available_cpus
        from service.tasks import TASKS
    except ModuleNotFoundError as error:
        fail(
            f"bench needs {error.name}, which the serving install leaves out; install cloze[cpu,bench]"
        )
    if (infinity or pipeline) and checkpoint is None:
        fail("peers need the weights as a checkpoint: give --checkpoint")
    pythons = {"Cloze": sys.executable, "infinity-emb": infinity, "pipeline": pipeline}
    asked, threads = TASKS[task], available_cpus()
    try:
        _open_out(out)
        chosen = _texts(texts, models[0], Store(model_store), count, asked)
        ours = [
            (name, precision, name if precision == "auto" else f"{name} {precision}")
            for name in models
            for precision in precisions
        ]
        engines = {
            f"{title} engine": partial(
                subjects.EngineAlone,
                name,
                model_store,
                asked,
                chosen.texts,
                precision=_precision(precision),
                device=Device(device),
            )
            for name, precision, title in ours
        }
        servers = [
            subjects.cloze(
                f"{title}{f' {number} front end' + 's' * (number > 1) if number else ''} server",
                name,
                model_store,
                asked.route,
                _precision(precision),
                Device(device),
                number,
            )
            for name, precision, title in ours
            for number in frontends
        ]
        if checkpoint and infinity:
            servers += [
                subjects.infinity(infinity, checkpoint, engine) for engine in ("torch", "optimum")
            ]
        if checkpoint and pipeline:
            servers.append(subjects.pipeline(pipeline, checkpoint, asked))
        versions = {title: installed(python) for title, python in pythons.items() if python}
        lengths = next(iter(engines.values()))().lengths
        plan = Plan(
            clients=tuple(int(number) for number in clients),
            shares=shares,
            arrivals=_arrivals(arrivals) if arrivals else None,
            texts_per_request=each,
            bulk=bulk,
            seconds=seconds,
            turns=turns,
        )
        found, starts = measure(
            engines, servers, chosen.texts, plan, lambda line: click.echo(line, err=True)
        )
    except (
        BenchError,
        StoreError,
        StartupError,
        subprocess.CalledProcessError,
        ValueError,
        OSError,
    ) as error:
        fail(str(error))
    result = Result(
        command=shlex.join(["cloze", *sys.argv[1:]]),
        date=_now(),
        machine=describe_machine(threads),
        versions=versions,
        model=", ".join(Store(model_store).manifest(name).reference for name in models)
        + f", {task}",
        texts={
            "from": chosen.source,
            "count": len(chosen.texts),
            "mean tokens": round(sum(lengths) / len(lengths), 1),
        },
        turns=found,
        starts=starts,
    )
    _tell(result, out)


@bench.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="Also what did not move.")
def compare(before: Path, after: Path, every: bool) -> None:
    """Name what moved from one result (JSON) to another, beyond what their turns differ among themselves."""
    try:
        from bench.compare import compare as compare_results
        from bench.compare import table
        from bench.result import Result
    except ModuleNotFoundError as error:
        fail(
            f"bench needs {error.name}, which the serving install leaves out; install cloze[cpu,bench]"
        )
    try:
        moves = compare_results(Result.from_json(before), Result.from_json(after))
    except (OSError, ValueError) as error:
        fail(str(error))
    click.echo(table(moves, every=every), nl=False)


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M}"


def _open_out(out: Path | None) -> None:
    """That nothing can be written there is better told now than at the end."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        Path(f"{out}.json").touch()


def _tell(result: "Result", out: Path | None) -> None:
    from bench.report import table

    click.echo(table(result))
    _write(result, out)


def _write(result: "Result", out: Path | None) -> None:
    from bench.report import draw, table

    if out is not None:
        Path(f"{out}.json").write_text(result.to_json())
        Path(f"{out}.md").write_text(table(result))
        if not result.cells:  # whose tables say more than curves of loads that are not alike
            draw(result, Path(f"{out}.png"))


def _precision(name: str) -> "RequestedPrecision":
    return "auto" if name == "auto" else Precision(name)


def _texts(file: Path | None, model: str, store: Store, count: int, task: "Task") -> "Texts":
    """What to send: for fill-mask, each with one word masked."""
    from bench.texts import make_texts, mask_a_word, read_texts, words_of

    bundle = store.open(model)
    texts = read_texts(file, count) if file else make_texts(words_of(bundle), count)
    return (
        mask_a_word(texts, bundle.manifest.tokenizer.mask_token or "")
        if task.name == "fill-mask"
        else texts
    )


def _arrivals(file: Path) -> "NDArray[np.float64]":
    """Seconds since the first, of a CSV with a column ``timestamp``."""
    import csv

    import numpy as np

    with file.open(newline="") as stream:
        reader = csv.DictReader(stream)
        if "timestamp" not in (reader.fieldnames or ()):
            raise ValueError(f"{file} has no column 'timestamp'")
        times = [datetime.fromisoformat(row["timestamp"][:26]).timestamp() for row in reader]
    if len(times) < 2 or times[0] == times[-1]:
        raise ValueError(f"{file} has fewer than two arrival times")
    return np.sort(np.asarray(times)) - min(times)
