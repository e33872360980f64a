"""What must be true in every history: the promises of docs/operate.md, as checks."""

from typing import TYPE_CHECKING

from cloze.service.service import Snapshot
from tests.support.world.server import POISON

if TYPE_CHECKING:
    from tests.support.world.clients import Asked
    from tests.support.world.history import World

SLACK_S = 0.5
"""Seconds by which an answer may be later than its limit: latencies, turns, and a batch's end."""

DEAD_S = 40.0
"""Seconds until a dead engine has ended its process: a canary, ten times a run, and a margin."""

ENDS = ("down", "kill", "hang", "broken", "drain", "exit")
"""Faults that end a process: requests may get 503, or lose their connection."""


def check_answer(world: "World", asked: "Asked") -> None:
    """Check one outcome: the status is allowed, and it comes in time."""
    assert asked.ended is not None
    begin, end = asked.began, asked.ended
    ends = world.overlaps(begin - SLACK_S, end, *ENDS)
    late = world.overlaps(begin, end, "stop", "slow", *ENDS)
    limit_s = asked.limit_s or dict(world.history.settings).get("request_timeout_ms", 30_000) / 1000
    took_s = end - (asked.sent or begin)
    status, kind = asked.status, asked.kind
    is_crowded = "max_connections" in dict(world.history.settings)
    allowed = {200}
    if kind not in ("polite",):
        allowed.add(429)
    if ends or is_crowded:
        allowed.add(503)
    if late or kind == "limited":
        allowed.add(504)
    if world.overlaps(begin, end, "errors", "broken") or POISON in " ".join(asked.texts):
        allowed.add(500)
    if kind == "slow writer":
        allowed |= {408}
    if asked.lost:
        if asked.lost == "the client left":
            if not KINDS_LEAVE.get(kind) and not late:
                world.fails(f"no answer: {asked}")
        elif not ends and not is_crowded and kind != "slow writer" and asked.is_first:
            world.fails(f"a request was lost: {asked}")
        return
    if status not in allowed:
        world.fails(f"the status is not allowed: {asked}")
    if not late and took_s > limit_s + SLACK_S:
        world.fails(f"an answer is {took_s - limit_s:.2f} s late: {asked}")
    if status == 429:
        if asked.told_s > 60.0:
            world.fails(f"told to wait for {asked.told_s} s: {asked}")
        if took_s > 1.0 + 2.5 + SLACK_S and not late:
            world.fails(f"a refusal took {took_s:.2f} s: {asked}")


KINDS_LEAVE = {"leaving": True}


def check_exit(world: "World", code: int) -> None:
    """Check the exit code: 1 only of a dead engine."""
    now = world.kernel.now
    if code and not world.overlaps(now - 0.1, now, "hang", "broken", "stop", "slow", "errors"):
        world.fails("the process ended with 1 without a reason")


def check_readiness(world: "World", began: float, status: int) -> None:
    """Check that a server is ready unless a fault says otherwise."""
    now = world.kernel.now
    if "max_connections" in dict(world.history.settings):
        return
    if status != 200 and not world.overlaps(began - 1.0, now, "stop", *ENDS):
        world.fails(f"readiness is {status} without a reason")


def check_snapshots(world: "World") -> None:
    """Check that at most two versions have threads."""
    process = world.server.process
    if process is None:
        return
    watchdogs = sum(t.name == "watchdog" for t in process.threads)
    if watchdogs > 2:
        world.fails(f"{watchdogs} engines are open")


def check_accounts(world: "World") -> None:
    """Check that nothing is held when all clients have gone; a canary may run for a moment."""
    for _ in range(20):
        held = {name: number for name, number in _held(world).items() if number}
        if not held:
            return
        world.kernel.sleep(0.1)
    world.fails(f"something is held at the end: {held}")


def _held(world: "World") -> dict[str, int]:
    """Return what the accounts of the server hold."""
    server = world.server
    service, http = server.service, server.http
    assert service is not None
    held = {}
    for model in service.snapshot.by_name.values():
        queue = model.queue
        held["queue tokens"] = queue._queue.tokens
        held["queue clients"] = len(queue._queue._clients)
        held["queue lines"] = len(queue._queue.lines)
        held["demand"] = len(queue._queue.demand._tokens)
        held["clients' requests"] = len(queue._activity.requests)
        held["workers on long texts"] = len(queue._on_long_texts)
        held["watched runs"] = len(queue._watchdog._runs)
    limits = service._limits
    for budget in (limits.bodies, limits.answers, limits.writers):
        held[budget._what] = budget._held + len(budget._holds) + len(budget._waiting)
    held["starts"] = service._starts.waiting + len(service._starts.unsubmitted) + len(service._starts._lines)
    held["refused"] = len(service._returns.refused)
    held["connections"] = http._table._open + len(http._table._by_address) + len(http._table.idle)
    held["protocols"] = len(http.server_state.connections)
    held["tasks"] = len(http.server_state.tasks)
    held["running"] = service.snapshot.running
    held["in flight"] = service._metrics.in_flight
    held["work"] = len(service._work)
    return held


def check_history(world: "World") -> None:
    """Check what only the whole history shows."""
    for asked in world.requests:
        if asked.ended is None:
            world.fails(f"never ended: {asked}")
    check_bulk(world)


def check_bulk(world: "World") -> None:
    """Check that a tenth of the tokens are of bulk requests while these wait.

    Two batches and the longest text may run before the first bulk batch.
    """
    waited = owed = 0.0
    for run in world.server.runs:
        if not run.bulk_waits:
            waited = owed = 0.0
            continue
        waited += run.tokens
        owed = max(0.0, owed + 0.1 * run.tokens - run.bulk_tokens)
        if owed > 3 * 512:
            world.fails(f"bulk requests are owed {owed:.0f} of {waited:.0f} tokens at {run.ended:.3f}")
            return
