"""The benchmark measures what it says: real servers, a server that stalls, arithmetic on made
results.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from click.testing import CliRunner

from cloze.bench.compare import compare
from cloze.bench.http_client import Connection, Request, post
from cloze.bench.load import closed_loop, open_loop
from cloze.bench.result import Load, LoadKind, Result, Turn
from cloze.bench.texts import read_texts
from cloze.cli import cli
from cloze.model_store.installation import DISTRIBUTION
from tests.support.serving import Server

pytestmark = pytest.mark.anyio


@contextmanager
def stub(stall: tuple[float, float] = (0.0, 0.0), delay: float = 0.0) -> Iterator[str]:
    """A server that answers after ``delay``, but nobody between ``stall``'s two seconds after its
    first request.
    """
    loop = asyncio.new_event_loop()
    first: list[float] = []
    writers: list[asyncio.StreamWriter] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(
                int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            )
            first.append(time.perf_counter())
            since = time.perf_counter() - first[0]
            if stall[0] <= since < stall[1]:
                await asyncio.sleep(stall[1] - since)
            await asyncio.sleep(delay)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]")

    async def handle_quietly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(asyncio.IncompleteReadError):
            await handle(reader, writer)

    thread = Thread(target=loop.run_forever)
    thread.start()
    listening = asyncio.start_server(handle_quietly, "127.0.0.1", 0)
    server = asyncio.run_coroutine_threadsafe(listening, loop).result(5)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:

        async def end() -> None:
            server.close()
            for writer in writers:
                writer.close()
                await writer.wait_closed()

        asyncio.run_coroutine_threadsafe(end(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


REQUESTS = [Request(post("/embed", b'{"inputs": "a"}'))]


def test_a_stall_is_charged_to_all_who_came_meanwhile() -> None:
    """Half a second of 100 arrivals each second: about 50 of 100 wait, 250 ms on average.

    Not one, as a closed loop would say.
    """
    arrivals = np.arange(100) / 100
    with stub(stall=(0.2, 0.7)) as url:
        found = asyncio.run(open_loop(url, REQUESTS, arrivals))
    assert found.requests == 100
    assert found.latencies.get_value_at_percentile(75) > 200_000
    assert found.latencies.get_value_at_percentile(25) < 100_000
    with stub(stall=(0.2, 0.7)) as url:
        closed = asyncio.run(closed_loop(url, REQUESTS, clients=1, seconds=1.0))
    assert closed.latencies.get_value_at_percentile(75) < 100_000


def test_throughput_is_what_the_server_answers_within_the_time() -> None:
    """Each of 4 clients gets an answer after 0.2 s: 20 a second, though the last ones of a load
    come after its end.
    """
    with stub(delay=0.2) as url:
        found = asyncio.run(closed_loop(url, REQUESTS, clients=4, seconds=0.95))
    assert found.statuses == {200: 16}
    assert found.seconds == 0.95


async def test_an_idle_connection_that_was_closed_is_opened_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a peer's uvicorn does after 5 s: not a failure of the server."""
    connections: list[Connection] = []
    original = Connection.connect

    async def to(url: str) -> Connection:
        connections.append(await original(url))
        return connections[-1]

    with stub() as url:
        monkeypatch.setattr(Connection, "connect", to)
        running = asyncio.create_task(open_loop(url, REQUESTS, np.array([0.0, 0.0, 0.5])))
        await asyncio.sleep(0.35)
        for connection in connections:
            await connection.close()
        found = await running
    assert (found.statuses[200], len(connections)) == (3, 3)


def test_answers_are_counted_by_status(servers: Callable[[tuple[str, ...]], Server]) -> None:
    server = servers(())
    requests = [
        Request(
            post("/embed", json.dumps({"inputs": ["one", "two"], "model": "bert"}).encode()), 2
        ),
        Request(post("/embed", b'{"inputs": 1}')),
        Request(post("/nowhere", b"{}")),
    ]
    found = asyncio.run(closed_loop(server.url, requests, clients=2, seconds=0.5))
    assert set(found.statuses) == {200, 422, 404}
    assert found.requests == found.statuses[200] == found.latencies.get_total_count()
    assert found.texts == 2 * found.requests


def test_texts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n{"question": "two"}\n')
    assert (
        read_texts(tmp_path / "lines.txt", 10).texts
        == read_texts(tmp_path / "rows.jsonl", 10).texts
        == ["one", "two"]
    )


def result(*turns: Turn) -> Result:
    return Result("m@1", {"Cloze": {"cloze": "0"}}, {"mixed": "one"}, turns=list(turns))


CLOSED = Load(LoadKind.CLOSED, 32)


def turns(subject: str, speeds: list[float]) -> list[Turn]:
    return [
        Turn(subject, CLOSED, number, speed, latency_ms={"p50": 1000 / speed})
        for number, speed in enumerate(speeds)
    ]


def test_only_what_moved_beyond_the_turns_spread_is_named() -> None:
    before = result(
        *turns("steady", [100, 101, 99]), *turns("noisy", [80, 100, 120]), *turns("gone", [1.0])
    )
    after = result(
        *turns("steady", [110, 111, 109]), *turns("noisy", [95, 110, 115]), *turns("new", [1.0])
    )
    found = {(move.subject, move.figure): move.verdict for move in compare(before, after)}
    assert found == {
        ("steady", "texts_per_s"): "better",
        ("steady", "p50"): "better",
        ("noisy", "texts_per_s"): "same",
        ("noisy", "p50"): "same",
    }
    worse = {(move.subject, move.figure): move.verdict for move in compare(after, before)}
    assert worse["steady", "texts_per_s"] == worse["steady", "p50"] == "worse"


def test_a_result_that_fails_is_worse() -> None:
    good = Turn("one", CLOSED, 0, 100.0, answered=50, latency_ms={"p50": 10.0})
    half = Turn("one", CLOSED, 0, 100.0, answered=25, failed={"429": 25}, latency_ms={"p50": 5.0})
    nothing = Turn("one", CLOSED, 0, 0.0, failed={"500": 50})
    verdicts = {move.figure: move.verdict for move in compare(result(good), result(half))}
    assert (verdicts["failed"], verdicts["p50"]) == ("worse", "better")
    verdicts = {move.figure: move.verdict for move in compare(result(good), result(nothing))}
    assert verdicts["failed"] == verdicts["texts_per_s"] == "worse"


def test_a_result_comes_back_from_its_file(tmp_path: Path) -> None:
    original = result(*turns("one", [1.0, 2.0]))
    (tmp_path / "result.json").write_text(original.to_json())
    assert Result.from_json(tmp_path / "result.json") == original
    assert original.median("one", CLOSED, "texts_per_s") == 1.5
    (tmp_path / "bad.json").write_text('{"turns": []}')
    with pytest.raises(ValueError, match="no result of cloze bench"):
        Result.from_json(tmp_path / "bad.json")


def test_the_whole_way(tiny_store: Path, tmp_path: Path) -> None:
    """Engine and server on a tiny bundle: a table, and figures that compare with themselves."""
    out = tmp_path / "results" / "tiny"
    store = ["--model", "bert", "--model-store", str(tiny_store), "--out", str(out)]
    sizes = "--seconds 0.4 --turns 2 --clients 1 --pauses 20 --shares 0.3 --count 60"
    done = CliRunner().invoke(cli, ["bench", "run", *store, *sizes.split()])
    assert done.exit_code == 0, done.output
    found = Result.from_json(out.with_suffix(".json"))
    loads = ["closed 1", "pause 20", "poisson 0.3", "single beside bulk"]
    assert [load.name for load in found.loads()] == loads
    assert found.subjects() == ["bert engine", "bert server"]
    assert found.versions["Cloze"][DISTRIBUTION] == version(DISTRIBUTION)
    for load in found.loads():
        turns = found.of("bert server", load)
        assert [turn.turn for turn in turns] == [0, 1]
        assert all(turn.texts_per_s > 0 and not turn.failed for turn in turns)
        assert all(10 < turn.pss_mb < turn.rss_mb for turn in turns)  # a page that others map too
    assert all(start.rss_mb > 20 for start in found.starts)
    assert "| closed 1 | bert server |" in out.with_suffix(".md").read_text()
    compare = ["bench", "compare", *[str(out.with_suffix(".json"))] * 2]
    assert CliRunner().invoke(cli, compare).output.startswith("nothing moved")
    every = CliRunner().invoke(cli, [*compare, "--all", "--json"])
    rows = [json.loads(line) for line in every.output.splitlines()]
    assert {row["verdict"] for row in rows} == {"same"}
    assert {row["load"] for row in rows} == set(loads)


@pytest.mark.slow
def test_the_pods_of_a_mix_are_measured(tiny_store: Path, tmp_path: Path) -> None:
    (tmp_path / "mix.csv").write_text("texts,share\nquestions,30\nmine.txt,10\n")
    (tmp_path / "mine.txt").write_text("the water of the house\n" * 20)
    command = ["bench", "pods", str(tmp_path / "mix.csv"), "--rate", "500", "--json"]
    command += ["--model", "bert", "--model-store", str(tiny_store), "--seconds", "0.5"]
    done = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    shares = {kind["texts"]: kind["share"] for kind in answer["kinds"]}
    assert shares == {"questions": 0.75, "mine": 0.25}
    measured = Result.from_json(tmp_path / "mine.json")
    for kind in answer["kinds"]:
        assert kind["cpu_ms"] == measured.median(
            "bert server", Load(LoadKind.CLOSED, 32, kind["texts"]), "cpu_ms"
        )
    assert answer["cores"] == pytest.approx(500 * answer["cpu_ms"] / 1000)
    again = CliRunner().invoke(cli, [*command, "--measured", str(tmp_path / "mine.json")])
    assert json.loads(again.stdout) == answer


@pytest.mark.slow
def test_all_that_a_device_gives(tmp_path: Path) -> None:
    """The programme that measures a GPU, on this CPU and at small size: engines, padded, torch's
    ways, a server.
    """
    command = (
        "bench device --device cpu --sizes tiny --lengths 16,64,512 --batch-tokens 32,512"
        f" --frontends 1 --sequences 40 --seconds 0.03 --out {tmp_path / 'tiny'}"
    )
    done = CliRunner().invoke(cli, command.split())
    assert done.exit_code == 0, done.output
    found = Result.from_json(tmp_path / "tiny.json")
    cells = {(cell.subject, cell.lengths, cell.batch_tokens): cell for cell in found.cells}
    grid = {key[1:] for key in cells if key[0] == "tiny engine" and key[1] != "SQuAD"}
    # 64 do not fit into 32, nor 512 into the model
    assert grid == {("16", 32), ("16", 512), ("64", 512)}
    ran = {subject for subject, lengths, _ in cells if lengths == "SQuAD"}
    assert ran >= {"tiny engine", "tiny engine, padded", "tiny torch padded"}
    assert all(c.of_peak > 0 and c.tokens_per_s > c.sequences_per_s > 0 for c in found.cells)
    assert [load.name for load in found.loads()] == ["closed 4 SQuAD x 32", "closed 1 short"]
    assert not any(turn.failed for turn in found.turns)
    written = (tmp_path / "tiny.md").read_text()
    assert "| tiny engine, padded | SQuAD | 512 |" in written
    assert "closed 4 SQuAD x 32 | tiny 1 front end server | tiny engine |" in written


async def test_a_connection_that_the_server_ends_takes_no_further_request() -> None:
    """The answer says so; the end of the connection may arrive later."""
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for header in (b"", b"connection: close\r\n"):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + header + b"content-length: 0\r\n\r\n")
        await reader.read()  # the client ends the connection
        writer.close()
        await writer.wait_closed()
        ended.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        connection = await Connection.connect(f"http://127.0.0.1:{port}")
        for is_open in (True, False):
            await connection.send(b"GET / HTTP/1.1\r\n\r\n")
            assert connection.open == is_open
        with pytest.raises(ConnectionResetError):
            await connection.send(b"GET / HTTP/1.1\r\n\r\n")
        await connection.close()
        await asyncio.wait_for(ended.wait(), 10)
