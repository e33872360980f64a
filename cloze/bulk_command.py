"""``cloze bulk``: results for the texts of large files, without a server."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.options import complete_bundle, json_option, store_option
from cloze.tables import report

if TYPE_CHECKING:
    from cloze.bulk.run import RunShards, Watcher
    from cloze.bulk.summary import Summary

F = TypeVar("F", bound=Callable[..., None])

ROWS_WITH_ERRORS = 3
"""Exit code of a run whose results are complete, but have rows with an error."""

_LINE_EVERY_S = 30.0
"""Seconds between lines about the progress, where no bar is shown."""


@click.group()
def bulk() -> None:
    """Run a task on the texts of large files, without a server.

    Each row of the input is one row of the output, which has the input's columns and those of the
    results. A row whose text is missing or wrong has the reason in the column `error`. A run that
    was ended continues with the same command.

    Exit codes: 0 if every row has a result, 1 for an error, 2 for wrong arguments, and 3 if all
    rows are written, but some have an error.
    """


_INPUT = [
    click.argument(
        "paths",
        metavar="INPUT...",
        nargs=-1,
        required=True,
        type=click.Path(path_type=Path),
    ),
    click.option(
        "--output",
        required=True,
        type=click.Path(path_type=Path),
        help="Folder of the results: new, empty, or of the same run.",
    ),
    click.option(
        "--output-format",
        type=click.Choice(["parquet", "jsonl"]),
        help="Format of the results.  [default: jsonl for JSON lines, else parquet]",
    ),
]

_OUTPUT = [
    click.option(
        "--id-column",
        metavar="NAME",
        help="The only column of the input to keep.  [default: all columns]",
    ),
    click.option("--prefix", default="", help="Text before the names of the result columns."),
    click.option(
        "--shard-rows",
        type=click.IntRange(1),
        default=10_000,
        help="Most rows per file of results. A file is complete after 20 s at the latest, and a "
        "run that was ended repeats at most the files that it had begun.",
    ),
    click.option(
        "--model",
        shell_complete=complete_bundle,
        help="Model, as for `cloze serve --model`.  [default: the task's]",
    ),
    click.option(
        "--adapter",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help="Folder of an adapter of the model, which answers.",
    ),
    click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="Device.  [default: auto]"
    ),
    click.option(
        "--precision",
        type=click.Choice(["auto", "fp32", "int8", "fp16"]),
        help="Precision of the arithmetic.  [default: auto]",
    ),
]

_RAY = [
    click.option("--ray", "on_ray", is_flag=True, help="Run on a Ray cluster, by Ray Data."),
    click.option(
        "--ray-address",
        help="Address of the cluster, or local for a new one on this machine; implies --ray.  "
        "[default: the cluster of this job or machine, or a new one]",
    ),
    click.option(
        "--ray-workers",
        type=click.IntRange(1),
        help="Number of workers.  [default: as many as there is room for]",
    ),
    click.option("--ray-worker-cpus", type=click.IntRange(1), default=1, help="Cores per worker."),
]


def _text_option(name: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}-column",
        f"{name}_column",
        metavar="NAME",
        default=name,
        help=f"Column with the {name}s.",
    )


def _long_text_option(default: str) -> Callable[[F], F]:
    return click.option(
        "--long-text",
        type=click.Choice(["error", "truncate", "window"]),
        help="What to do with a text that is too long: an error, cut the text, or divide it."
        f"  [default: {default}]",
    )


_top_k_option = click.option(
    "--top-k", type=click.IntRange(1), help="Number of results per text.  [default: the task's]"
)


def _bulk_options(*own: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that adds the options of a task, and those of all tasks."""

    def decorate(command: F) -> F:
        for option in reversed([*_INPUT, *own, *_OUTPUT, *_RAY, json_option, store_option]):
            command = option(command)
        return command

    return decorate


@bulk.command()
@_bulk_options(
    _text_option("text"),
    _long_text_option("truncate"),
    click.option("--dimensions", type=click.IntRange(1), help="Leading dimensions to keep."),
    click.option("--normalize/--no-normalize", default=None, help="Scale vectors to length 1."),
    click.option("--prompt-name", help="Name of a prompt of the model, put before each text."),
    click.option(
        "--input-type",
        type=click.Choice(["query", "document"]),
        help="What the texts are for, which chooses the model's own prompt.",
    ),
)
def embed(**options: Any) -> None:
    """Write the vector of each text to the column `embedding`.

    \b
      cloze bulk embed articles.parquet --output vectors
      cloze bulk embed logs/ --text-column message --id-column id --output vectors
    """
    _run("embed", options)


@bulk.command("fill-mask")
@_bulk_options(
    _text_option("text"),
    _long_text_option("truncate"),
    _top_k_option,
    click.option("--target", "targets", multiple=True, help="Token to choose among; repeatable."),
)
def fill_mask(**options: Any) -> None:
    """Write the likeliest tokens at each mask to the column `predictions`, one list per mask.

    \b
      cloze bulk fill-mask gaps.jsonl --top-k 3 --output predictions
    """
    _run("fill-mask", options)


@bulk.command()
@_bulk_options(_text_option("text"), _long_text_option("truncate"), _top_k_option)
def classify(**options: Any) -> None:
    """Write the labels of each text to the column `labels`, best first.

    \b
      cloze bulk classify reviews.csv --model my-classifier --output labels
    """
    _run("classify", options)


@bulk.command("zero-shot-classification")
@_bulk_options(
    _text_option("text"),
    _long_text_option("truncate"),
    click.option(
        "--label", "candidate_labels", multiple=True, required=True, help="Own label; repeatable."
    ),
    click.option(
        "--template",
        "hypothesis_template",
        help="Sentence with {} in the label's place.  [default: This example is {}.]",
    ),
    click.option("--multi-label", is_flag=True, default=None, help="Judge each label alone."),
)
def zero_shot_classification(**options: Any) -> None:
    """Write how well your own labels fit each text to the column `labels`, best first.

    \b
      cloze bulk zero-shot-classification mails.csv --label complaint --label order --output sorted
    """
    _run("zero-shot-classification", options)


@bulk.command()
@_bulk_options(
    _text_option("text"),
    _long_text_option("truncate"),
    click.option("--label", "labels", multiple=True, required=True, help="Own label; repeatable."),
    click.option("--threshold", type=click.FloatRange(0, 1), help="Score that entities exceed."),
    click.option("--nested", "flat_ner", flag_value=False, default=None, help="Allow nesting."),
    click.option("--multi-label", is_flag=True, default=None, help="Allow several labels."),
)
def entities(**options: Any) -> None:
    """Write the entities of your own labels to the column `entities`.

    \b
      cloze bulk entities mails.csv --label person --label product --output found
    """
    _run("entities", options)


@bulk.command()
@_bulk_options(
    _text_option("text"),
    click.option("--label", "labels", multiple=True, help="Label to replace; repeatable."),
    click.option(
        "--pattern",
        "patterns",
        type=click.Choice(["EMAIL", "PHONE", "IBAN", "CARD"]),
        multiple=True,
        help="Form to replace besides; repeatable.",
    ),
    click.option("--region", help="Country of telephone numbers without +, in two letters."),
    click.option("--min-score", type=click.FloatRange(0, 1), help="Least score of an entity."),
)
def redact(**options: Any) -> None:
    """Write each text with placeholders for its entities to the column `redacted`.

    \b
      cloze bulk redact mails.csv --pattern EMAIL --pattern IBAN --output redacted
    """
    _run("redact", options)


@bulk.command()
@_bulk_options(
    _text_option("question"),
    _text_option("context"),
    _long_text_option("window"),
    _top_k_option,
)
def qa(**options: Any) -> None:
    """Write the answers to each question to the column `answers`, best first.

    \b
      cloze bulk qa questions.jsonl --output answers
    """
    _run("qa", options)


def _run(command: str, values: dict[str, Any]) -> None:
    """Run a task with the values of all options, and print the summary."""
    try:
        from cloze.bulk.errors import BulkError
        from cloze.bulk.job import JobOptions
        from cloze.bulk.plan import FileFormat
        from cloze.bulk.run import run_job
        from cloze.bulk.sources import input_files
        from cloze.bulk.tasks import BULK_TASKS
        from cloze.service.errors import StartupError
    except ModuleNotFoundError as error:
        fail(f"bulk needs {error.name}; install it with: {install_command('cpu', 'bulk')}", code=2)
    try:
        settings = _settings(values)
        file_format = values["output_format"]
        if file_format is None:
            is_jsonl = input_files(values["paths"])[0] is FileFormat.JSONL
            file_format = "jsonl" if is_jsonl else "parquet"
        task = BULK_TASKS[command]
        options = JobOptions(
            command,
            tuple(values[f"{text}_column"] for text in task.inputs),
            {
                name: list(value) if isinstance(value, tuple) else value
                for name in task.task.parameters.model_fields
                if (value := values.get(name)) not in (None, ())
            },
            values["id_column"],
            values["prefix"],
            FileFormat(file_format),
            values["shard_rows"],
        )
        with _watcher(shown=not values["as_json"]) as watcher:
            summary = run_job(
                values["paths"], values["output"], options, settings, _engine(values), watcher
            )
    except StartupError as error:
        fail(str(error), code=2)
    except BulkError as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted; complete files are kept, the same command goes on from there", 130)
    _print(summary, as_json=values["as_json"])


def _settings(values: dict[str, Any]) -> Any:
    """Return the settings of the engine: those of a server, without limits of its queue.

    Nobody waits for a single text, so a batch may last long.
    """
    from cloze.service.settings import load_settings

    flags = {name: values[name] for name in ("model_store", "device", "precision")}
    if values["model"] is not None:
        flags |= {"model": (values["model"],), "default": ()}
    adapter = values["adapter"]
    flags["adapter"] = (str(adapter.absolute()),) if adapter is not None else ()
    flags |= {"max_queue_wait_ms": 0, "max_queue_tokens": 2**62, "batch_latency_ms": 1000}
    return load_settings(flags)


def _engine(values: dict[str, Any]) -> "RunShards":
    from cloze.bulk.local_run import run_locally

    if not values["on_ray"] and values["ray_address"] is None:
        return run_locally
    try:
        from cloze.bulk.ray_run import RayOptions, run_on_ray
    except ModuleNotFoundError as error:
        fail(f"--ray needs {error.name}; install it with: {install_command('cpu', 'ray')}", code=2)
    options = RayOptions(
        values["ray_address"], values["ray_workers"] or 0, values["ray_worker_cpus"]
    )
    return lambda job, shards, on_rows: run_on_ray(job, shards, on_rows, options)


@contextmanager
def _watcher(*, shown: bool) -> Iterator["Watcher"]:
    """Yield what shows a progress bar, or a line every 30 s if standard error is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from cloze.bulk.run import Watcher

    console = Console(stderr=True)
    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TimeRemainingColumn())
    if shown and not console.is_terminal:
        lines = _Lines()
        yield Watcher(report=report, on_plan=lines.on_plan, on_rows=lines.on_rows)
        return
    with Progress(*columns, console=console, disable=not shown, expand=True) as bar:
        rows = bar.add_task("rows", total=None)
        yield Watcher(
            report=report,
            on_plan=lambda total, done: bar.update(rows, total=total, completed=done),
            on_rows=lambda count: bar.advance(rows, count),
        )


class _Lines:
    """Reports the rows that are written, every `_LINE_EVERY_S`."""

    def __init__(self) -> None:
        self._total = self._done = self._new = 0
        self._began = self._last = time.monotonic()

    def on_plan(self, total: int, done: int) -> None:
        self._total, self._done = total, done
        self._began = self._last = time.monotonic()

    def on_rows(self, count: int) -> None:
        self._done += count
        self._new += count
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            rate = self._new / (now - self._began)
            left_s = (self._total - self._done) / rate
            report(
                f"{self._done:,} of {self._total:,} rows, {rate:,.1f} rows/s, "
                f"about {left_s / 60:,.0f} min left"
            )


def _print(summary: "Summary", *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(summary)))
    else:
        click.echo("\n".join(summary.lines()))
    if summary.errors:
        fail(
            f"{summary.errors} of {summary.rows} rows have an error, the first of them "
            f"{summary.first_error}",
            ROWS_WITH_ERRORS,
        )
