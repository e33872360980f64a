"""``cloze ask``: sends inputs to a task, and prints the results as a table."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.options import json_option
from cloze.tables import print_rows

if TYPE_CHECKING:
    from cloze.client import AsyncClient

_SHOWN_NUMBERS = 6

_DEFAULT_URL = "http://localhost:8000"

Rows = list[dict[str, Any]]
"""The rows of a table: column -> value."""


@dataclass(frozen=True, slots=True)
class _Server:
    """The server that the user names.

    Attributes:
        url: its address; None: the default one, or this process if nothing listens there.
    """

    url: str | None
    key: str | None


@dataclass(frozen=True, slots=True)
class _Asking:
    """How the command line asks for one task.

    Attributes:
        arguments: names of the first arguments; the last of them may be repeated if ``repeats``.
        ask: (client, arguments, options that the user gave) -> the rows of the answer.
        repeats: whether the last argument may be repeated.
    """

    arguments: tuple[str, ...]
    ask: Callable[["AsyncClient", Sequence[str], dict[str, Any]], Awaitable[Rows]]
    repeats: bool = True
    options: tuple[str, ...] = ("model",)


async def _fill_mask(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    return [
        {"text": i, "mask": j, "score": p.score, "token": p.token_str, "sequence": p.sequence}
        for i, masks in enumerate(await client.fill_mask(texts, **options))
        for j, predictions in enumerate(masks)
        for p in predictions
    ]


async def _score(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    return [
        {"text": i, "log_probability": t.log_probability, "start": t.start, "token": t.token}
        for i, score in enumerate(await client.score(texts, **options))
        for t in score.tokens
    ]


async def _embed(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    vectors = await client.embed(texts, **options)
    return [
        {"text": i, "dimensions": len(vector), "vector": _start(vector)}
        for i, vector in enumerate(vectors)
    ]


async def _embed_all(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    return [
        {"text": i, "token": j, "dimensions": len(vector), "vector": _start(vector)}
        for i, vectors in enumerate(await client.embed_all(texts, **options))
        for j, vector in enumerate(vectors)
    ]


async def _embed_sparse(
    client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]
) -> Rows:
    return [
        {"text": i, "weight": word.value, "index": word.index, "token": word.token}
        for i, words in enumerate(await client.embed_sparse(texts, **options))
        for word in words
    ]


def _start(vector: Sequence[float]) -> str:
    return " ".join(f"{number:.4f}" for number in vector[:_SHOWN_NUMBERS]) + " ..."


async def _similarity(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    cosines = await client.similarity(texts[0], texts[1:], **options)
    return [
        {"cosine": float(cosine), "text": text}
        for cosine, text in zip(cosines, texts[1:], strict=True)
    ]


async def _nsp(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    follows = float((await client.nsp((texts[0], texts[1]), **options))[0])
    return [{"label": "IsNext", "score": follows}, {"label": "NotNext", "score": 1 - follows}]


async def _qa(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    answers = (await client.qa((texts[0], texts[1]), **options))[0]
    return [{"score": a.score, "start": a.start, "end": a.end, "answer": a.answer} for a in answers]


async def _classify(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    return [
        {"text": i, "score": label.score, "label": label.label}
        for i, labels in enumerate(await client.classify(texts, **options))
        for label in labels
    ]


async def _token_classification(
    client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]
) -> Rows:
    return [
        {"text": i, "score": e.score, "entity": e.entity, "start": e.start, "word": e.word}
        for i, entities in enumerate(await client.token_classification(texts, **options))
        for e in entities
    ]


async def _rerank(client: "AsyncClient", texts: Sequence[str], options: dict[str, Any]) -> Rows:
    ranks = await client.rerank(texts[0], texts[1:], **options)
    return [{"score": r.score, "index": r.index, "text": texts[1 + r.index]} for r in ranks]


_ASKING = {
    "fill-mask": _Asking(("TEXT",), _fill_mask, options=("model", "top_k", "targets")),
    "score": _Asking(("TEXT",), _score),
    "embed": _Asking(("TEXT",), _embed),
    "embed-all": _Asking(("TEXT",), _embed_all),
    "embed-sparse": _Asking(("TEXT",), _embed_sparse, options=("model", "top_k")),
    "similarity": _Asking(("TEXT", "OTHER"), _similarity),
    "nsp": _Asking(("TEXT", "NEXT"), _nsp, repeats=False),
    "qa": _Asking(("QUESTION", "CONTEXT"), _qa, repeats=False, options=("model", "top_k")),
    "classify": _Asking(("TEXT",), _classify, options=("model", "top_k")),
    "token-classification": _Asking(("TEXT",), _token_classification),
    "rerank": _Asking(("QUERY", "TEXT"), _rerank),
}


@click.command()
@click.argument("task", type=click.Choice(list(_ASKING)))
@click.argument("texts", nargs=-1, required=True)
@click.option("--url", help="Address of the server.  [default: port 8000 of this machine]")
@click.option(
    "--key", envvar="CLOZE_KEY", show_envvar=True, help="API key, if the server has keys."
)
@click.option("--model", help="Served model to ask, NAME or NAME@VERSION.")
@click.option("--top-k", type=click.IntRange(1), help="Number of results per text.")
@click.option("--target", "targets", multiple=True, help="Token to choose among; repeatable.")
@json_option
def ask(
    task: str,
    texts: tuple[str, ...],
    url: str | None,
    key: str | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Send TEXTS to TASK, and print the results as a table.

    A running server answers. If there is none at the default address, the models of the model store
    answer in this process, with the settings that the environment has for the server.

    \b
      cloze ask fill-mask "Paris is the [MASK] of France."
      cloze ask qa "Who died?" "The king was dead."
      cloze ask similarity "The king was dead." "The old king died." "A ship left."
    """
    asking = _ASKING[task]
    _check_arguments(task, asking, texts)
    options = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flags.items()
        if value not in (None, ())
    }
    for name in options.keys() - set(asking.options):
        option = "target" if name == "targets" else name.replace("_", "-")
        fail(f"{task} has no option --{option}", code=2)
    try:
        from cloze.client import ClientError
    except ModuleNotFoundError as error:
        fail(f"ask needs {error.name}; install it with: {install_command('client')}", code=2)
    try:
        rows = asyncio.run(_answer(asking, texts, options, _Server(url, key)))
    except ClientError as error:
        fail(str(error))
    if as_json:
        print_rows(rows, as_json=True)
    else:
        _print_table(rows)


def _check_arguments(task: str, asking: _Asking, texts: Sequence[str]) -> None:
    needed, given = len(asking.arguments), len(texts)
    if given < needed or (given > needed and not asking.repeats):
        usage = " ".join(asking.arguments) + (" ..." if asking.repeats else "")
        fail(f"{task} takes {usage}; there are {given} arguments", code=2)


async def _answer(
    asking: _Asking, texts: Sequence[str], options: dict[str, Any], server: _Server
) -> Rows:
    from cloze.client import AsyncClient, ServerUnreachable

    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    async with AsyncClient(server.url or _DEFAULT_URL, retries=0, headers=headers) as client:
        try:
            return await asking.ask(client, texts, options)
        except ServerUnreachable as error:
            if server.url is not None:
                raise
            click.echo(f"{error}; answering in this process", err=True)
    async with _in_process() as client:
        return await asking.ask(client, texts, options)


@asynccontextmanager
async def _in_process() -> AsyncIterator["AsyncClient"]:
    """Yield a client of a service in this process."""
    try:
        from cloze.service.app import single_process
        from cloze.service.core import StartupError
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
    shown = [{name: row[name] for name in columns} for row in rows]
    print_rows(shown, right=numbers, headings=True)
