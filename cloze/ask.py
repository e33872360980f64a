"""``cloze ask``: sends inputs to a task, and prints the results as a table."""

import asyncio
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import click

from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.options import complete_bundle, json_option
from cloze.tables import print_rows

if TYPE_CHECKING:
    from cloze.client import AsyncClient, Rank, Redaction

_SHOWN_NUMBERS = 6

Rows = list[dict[str, Any]]
"""The rows of a table: column -> value."""


@dataclass(frozen=True, slots=True)
class _Asking:
    """How the command line asks for one task. The client's method has the name of the task.

    Attributes:
        rows: (result of the method, arguments) -> the rows of the table.
        arguments: names of the first arguments; the last of them may be repeated if ``repeats``.
        inputs: arguments -> the positional arguments of the method.
        pair: how to ask for one pair of texts; None: the task has no pairs, or nothing else.
    """

    rows: Callable[[Any, Sequence[str]], Rows]
    arguments: tuple[str, ...] = ("TEXT",)
    inputs: Callable[[Sequence[str]], tuple[Any, ...]] = lambda texts: (list(texts),)
    repeats: bool = True
    pair: "_Asking | None" = None


def _table(
    *indices: str | None, **columns: str | Callable[[Any], Any]
) -> Callable[[Any, Sequence[str]], Rows]:
    """Return a function from nested lists of results to rows.

    Args:
        indices: the column of the index in each list; None: it has no column.
        columns: of each result: the field, or what computes the value.
    """
    values = {
        name: attrgetter(value) if isinstance(value, str) else value
        for name, value in columns.items()
    }

    def nested(results: Any, indices: Sequence[str | None]) -> Iterator[dict[str, Any]]:
        if not indices:
            yield {name: value(results) for name, value in values.items()}
            return
        for number, part in enumerate(results):
            index = {} if indices[0] is None else {indices[0]: number}
            yield from (index | row for row in nested(part, indices[1:]))

    return lambda results, _: list(nested(results, indices))


def _numbers(vector: Any) -> list[float]:
    return [float(number) for number in vector]


_LABELS = _table("text", None, score="score", label="label")
_SCORED = _table("text", None, log_probability="log_probability", start="start", token="token")


def _cosines(cosines: Sequence[float], texts: Sequence[str]) -> Rows:
    pairs = zip(cosines, texts[1:], strict=True)
    return [{"cosine": float(cosine), "text": text} for cosine, text in pairs]


def _ranks(ranks: "Sequence[Rank]", texts: Sequence[str]) -> Rows:
    return [{"score": r.score, "index": r.index, "text": texts[1 + r.index]} for r in ranks]


def _redacted(redactions: "Sequence[Redaction]", _: Sequence[str]) -> Rows:
    return [{"replaced": len(r.replacements), "text": r.text} for r in redactions]


def _pair_labels(scores: Sequence[float], _: Sequence[str]) -> Rows:
    follows = float(scores[0])
    return [{"label": "IsNext", "score": follows}, {"label": "NotNext", "score": 1 - follows}]


def _one_pair(texts: Sequence[str]) -> tuple[Any, ...]:
    return ((texts[0], texts[1]),)


def _first_and_rest(texts: Sequence[str]) -> tuple[Any, ...]:
    return texts[0], texts[1:]


_ASKING = {
    "fill-mask": _Asking(
        _table("text", "mask", None, score="score", token="token_str", sequence="sequence")
    ),
    "score": _Asking(lambda scores, texts: _SCORED([score.tokens for score in scores], texts)),
    "embed": _Asking(_table("text", dimensions=len, vector=_numbers)),
    "embed-all": _Asking(_table("text", "token", dimensions=len, vector=_numbers)),
    "embed-sparse": _Asking(_table("text", None, weight="value", index="index", token="token")),
    "similarity": _Asking(_cosines, ("TEXT", "OTHER"), _first_and_rest),
    "nsp": _Asking(_pair_labels, ("TEXT", "NEXT"), _one_pair, repeats=False),
    "qa": _Asking(
        _table(None, None, score="score", start="start", end="end", answer="answer"),
        ("QUESTION", "CONTEXT"),
        _one_pair,
        repeats=False,
    ),
    "classify": _Asking(
        _LABELS,
        pair=_Asking(_LABELS, ("TEXT", "OTHER"), _one_pair, repeats=False),
    ),
    "zero-shot-classification": _Asking(_LABELS),
    "token-classification": _Asking(
        _table("text", None, score="score", entity="entity", start="start", word="word")
    ),
    "entities": _Asking(
        _table("text", None, score="score", label="label", start="start", entity="text")
    ),
    "redact": _Asking(_redacted),
    "rerank": _Asking(_ranks, ("QUERY", "TEXT"), _first_and_rest),
}


@click.command()
@click.argument("task", type=click.Choice(list(_ASKING)))
@click.argument("texts", nargs=-1, required=True)
@click.option(
    "--url",
    envvar="CLOZE_URL",
    show_envvar=True,
    help="Address of the server, with or without http://.  "
    "[default: port CLOZE_PORT of this machine, or 8000]",
)
@click.option(
    "--key", envvar="CLOZE_KEY", show_envvar=True, help="API key, if the server has keys."
)
@click.option(
    "--model", shell_complete=complete_bundle, help="Served model to ask, NAME or NAME@VERSION."
)
@click.option("--top-k", type=click.IntRange(1), help="Number of results per text.")
@click.option("--target", "targets", multiple=True, help="Token to choose among; repeatable.")
@click.option("--label", "candidate_labels", multiple=True, help="Own label; repeatable.")
@click.option(
    "--input-type",
    type=click.Choice(["query", "document"]),
    help="What the texts are for, which chooses the prompt of a model that embeds.",
)
@click.option("--pattern", "patterns", multiple=True, help="Form to redact too; repeatable.")
@click.option("--pair", is_flag=True, help="Classify two texts as one pair.")
@json_option
def ask(
    task: str,
    texts: tuple[str, ...],
    url: str | None,
    key: str | None,
    pair: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Send TEXTS to TASK, and print the results as a table.

    A running server answers. If there is none at the default address, the models of the model store
    answer in this process, with the settings that the environment has for the server.

    \b
      cloze ask fill-mask "Paris is the [MASK] of France."
      cloze ask classify "I love it" "I do not"
      cloze ask classify --pair "A man sleeps." "Somebody rests."
      cloze ask zero-shot-classification "The team won the final." --label sport --label politics
      cloze ask entities "Ada Lovelace was born in London." --label person --label city
      cloze ask redact "Ada Lovelace, ada@example.org" --pattern EMAIL
      cloze ask qa "Who died?" "The king was dead."
      cloze ask similarity "The king was dead." "The old king died." "A ship left."
    """
    asking = _asking(task, texts, pair=pair)
    try:
        from cloze.client import ClientError
    except ModuleNotFoundError as error:
        fail(f"ask needs {error.name}; install it with: {install_command('client')}", code=2)
    options = _options(task, flags)

    async def ask_one(client: "AsyncClient") -> Rows:
        result = await _method(client, task)(*asking.inputs(texts), **options)
        return asking.rows(result, texts)

    try:
        rows = asyncio.run(_answer(ask_one, url, key))
    except ClientError as error:
        fail(str(error))
    if as_json:
        print_rows(rows, as_json=True)
    else:
        _print_table(rows)


def _asking(task: str, texts: Sequence[str], *, pair: bool) -> _Asking:
    """Return how to ask for a task; fail if it takes another number of texts, or no pair."""
    asking = _ASKING[task]
    if pair:
        if asking.pair is None:
            fail(f"{task} has no option --pair", code=2)
        asking = asking.pair
    needed, given = len(asking.arguments), len(texts)
    if given < needed or (given > needed and not asking.repeats):
        usage = " ".join(asking.arguments) + (" ..." if asking.repeats else "")
        is_given = "there is 1 argument" if given == 1 else f"there are {given} arguments"
        fail(f"{task}{' --pair' * pair} takes {usage}; {is_given}", code=2)
    return asking


def _default_url() -> str:
    """Return the address of a server of this machine that has our environment."""
    port = os.environ.get("CLOZE_PORT", "8000")
    if not port.isdecimal():
        fail(f"CLOZE_PORT is {port!r}, which is no port; give --url or CLOZE_URL", code=2)
    return f"http://localhost:{port}"


def _method(client: Any, task: str) -> Callable[..., Any]:
    method: Callable[..., Any] = getattr(client, task.replace("-", "_"))
    return method


def _options(task: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user gave; fail if the client's method lacks one of them."""
    from cloze.client import AsyncClient

    known = inspect.signature(_method(AsyncClient, task)).parameters
    if "labels" in known:
        flags = {{"candidate_labels": "labels"}.get(name, name): flags[name] for name in flags}
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    for name in given.keys() - known.keys():
        fail(f"{task} has no option --{_option(name)}", code=2)
    for name in flags.keys() & known.keys() - given.keys():
        if known[name].default is inspect.Parameter.empty:
            fail(f"{task} needs the option --{_option(name)}", code=2)
    return given


def _option(name: str) -> str:
    """Return the name of the option for a parameter of the client's methods."""
    repeated = {
        "targets": "target",
        "candidate_labels": "label",
        "labels": "label",
        "patterns": "pattern",
    }
    return repeated.get(name, name.replace("_", "-"))


async def _answer(
    ask_one: "Callable[[AsyncClient], Awaitable[Rows]]", url: str | None, key: str | None
) -> Rows:
    """Return the answer of the server at `url`; without an address, of the default one or ours."""
    from cloze.client import AsyncClient, ServerUnreachable

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        server = AsyncClient(url or _default_url(), retries=0, headers=headers)
    except ValueError as error:  # the address is none
        fail(str(error), code=2)
    async with server as client:
        try:
            return await ask_one(client)
        except ServerUnreachable as error:
            if url:
                raise
            click.echo(f"{error}; answering in this process", err=True)
    async with _in_process() as client:
        return await ask_one(client)


@asynccontextmanager
async def _in_process() -> AsyncIterator["AsyncClient"]:
    """Yield a client of a service in this process."""
    try:
        from cloze.service.errors import StartupError
        from cloze.service.service import single_process
        from cloze.service.settings import load_settings
    except ModuleNotFoundError as error:
        fail(f"answering without a server needs {error.name}, which is not installed", code=2)
    import httpx

    from cloze.client import AsyncClient

    try:
        service = single_process(load_settings({"access_log_share": "0"}))
    except StartupError as error:
        fail(str(error), code=2)
    try:
        service.begin()
        transport = httpx.ASGITransport(service)
        async with AsyncClient("http://localhost", retries=0, transport=transport) as client:
            yield client
    finally:
        service.close()


def _print_table(rows: Rows) -> None:
    """Print rows with numbers to the right; a column of zeros is left out."""
    if not rows:
        click.echo("nothing found")
        return
    columns = [
        name
        for name in rows[0]
        if name not in ("text", "mask") or any(row[name] != 0 for row in rows)
    ]
    numbers = [name for name in columns if isinstance(rows[0][name], int | float)]
    shown = [{name: _shown(row[name]) for name in columns} for row in rows]
    print_rows(shown, right=numbers, headings=True)


def _shown(value: Any) -> Any:
    """Return a value as a table has it: of a vector, the first numbers."""
    if not isinstance(value, list):
        return value
    return " ".join(f"{number:.4f}" for number in value[:_SHOWN_NUMBERS]) + " ..."
