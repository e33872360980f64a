"""What must be true in every history: the promises of docs/operate.md, as checks."""

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from cloze.service.batching.fair_queue import Batch, FairQueue, LineKey
from tests.support.world.clients import CROWDS, KINDS, probe
from tests.support.world.server import POISON

if TYPE_CHECKING:
    from tests.support.world.clients import Asked
    from tests.support.world.history import World

SLACK_S = 0.5
"""Seconds by which an answer may be later than its limit: latencies, turns, and a batch's end."""

DEAD_S = 80.0
"""Seconds until a broken engine has ended its process, at most: the first canary may take 60 s."""

ROOM_S = 30.0
"""Seconds in which a waiting client may have room, at most: half of its time, and 10 s.

The time is that of the work before it while others share the rate, and these may leave.
"""

SILENT_S = 10.5
"""Seconds until a stopped process is replaced: 8 s of silence, looks, and a report's second."""

ENDS = ("down", "kill", "hang", "broken", "drain", "exit")
"""Faults that end a process: requests may get 503, or lose their connection."""


def check_answer(world: "World", asked: "Asked") -> None:
    """Check one outcome: the status is allowed, and it comes in time."""
    assert asked.ended is not None
    begin, end = asked.began, asked.ended
    limit_s = asked.limit_s or world.settings.get("request_timeout_ms", 30_000) / 1000
    took_s = end - (asked.sent or begin) - asked.read_s
    if asked.status == 200 and not asked.lost and took_s <= limit_s + SLACK_S:
        return
    is_dead = world.server.is_dead and not world.history.front_ends
    ends = is_dead or world.overlaps(begin - SLACK_S, end, *ENDS)
    survives = ends and _survives(world, asked)
    ends = ends and not survives
    late = world.overlaps(begin, end, "stop", "slow", *ENDS)
    hung = re.search(r"a run took longer than ([\d.]+) s", asked.error)
    since = min(begin, end - float(hung[1])) if hung else begin
    status, kind = asked.status, asked.kind
    is_crowded = "max_connections" in world.settings
    allowed = {200}
    if kind == "polite":  # nothing is admitted that makes an accepted request late
        is_full = "the queue holds" in asked.error and "max_queue_tokens" in world.settings
        allowed |= {429} if "beside what was accepted" in asked.error or is_full else set()
    elif kind != "loop" or not _may_loop(world):
        allowed.add(429)
    if ends or is_crowded or world.overlaps(since, end, "slow"):  # a run may seem to hang
        allowed.add(503)
    if asked.adapter:  # it waits for room among adapters before it waits in the queue
        allowed |= {429, 504}
    # Before a batch was measured, and by an idle queue, all are admitted. Texts run to their end.
    is_unknown = begin < world.server.measured_s + SLACK_S
    is_unknown |= asked.run_s > limit_s / 4
    is_excused = late or is_unknown or kind == "bulk"
    is_timed = bool(asked.limit_s) or "request_timeout_ms" in world.settings
    if is_excused or is_timed or world.longest_run_s > limit_s / 5:
        allowed.add(504)
    is_excused |= bool(asked.adapter) or world.longest_run_s > limit_s
    if status == 504 and is_timed and not is_excused:
        world.late.append(asked)
    if world.overlaps(begin, end, "errors", "broken") or POISON in " ".join(asked.texts):
        allowed.add(500)
    if kind == "slow reader":  # large answers wait for each other
        allowed |= {504}
    if kind == "slow writer":
        allowed |= {408, 500} if ends else {408}  # uvicorn's own 500 at the end of the process
    if world.overlaps(begin, end, "stop"):
        allowed.add(408)
    if asked.lost:
        if asked.lost == "the client left":
            if kind not in ("leaving", "crowd") and not late:
                world.fails(f"no answer: {asked}")
        elif not (ends or is_crowded or kind.startswith("slow ")) and asked.is_first:
            world.fails(f"a request was lost: {asked}")
        return
    if status not in allowed:
        world.fails(f"the status is not allowed: {asked}")
    if not late and status != 429 and took_s > limit_s + SLACK_S:
        world.fails(f"an answer is {took_s - limit_s:.2f} s late: {asked}")
    if status == 429:
        if asked.told_s > 60.0 and "per minute" not in asked.error:
            world.fails(f"told to wait for {asked.told_s} s: {asked}")
        most_s = SLACK_S + 2.5 * (KINDS[kind].padding > 0) + 1.0 * (not KINDS[kind].waits)
        if took_s > most_s and not late and not asked.adapter:
            world.fails(f"a refusal took {took_s:.2f} s: {asked}")
        if survives and any(fault.begin > begin + most_s for fault in world.faults_of("kill")):
            world.fails(f"it was admitted, and is refused after {took_s:.2f} s: {asked}")
        was_slower = world.overlaps(begin - 20.0, end, "slow", "stop", *ENDS)
        if asked.told_s > 10.0 and not was_slower and "per minute" not in asked.error:
            _check_told(world, asked)


def _check_told(world: "World", asked: "Asked") -> None:
    """Check that the time that a refused client is told is that of the work before it.

    The work is at most one request of each connection. Clients and their lines share the rate,
    which is measured, so the time may be several times that of the work alone.
    """
    share = 0.1 if asked.kind == "bulk" else 0.9  # of the rate
    work_s = sum(one.run_s for one in world.last.values())
    most_s = 10.0 + 6.0 * work_s / (2 * share)
    if asked.told_s > most_s:
        world.fails(f"told to wait for {asked.told_s} s, not at most {most_s:.1f} s: {asked}")


def _survives(world: "World", asked: "Asked") -> bool:
    """Return whether a request outlives what ends processes in its time.

    It does if its headers had arrived before a drain, and its body came in time. The requests of
    one engine process that is killed wait for the next one, to which they are sent again.
    """
    assert asked.ended is not None
    begin, end = asked.began - SLACK_S, asked.ended
    faults = [f for f in world.faults if f.kind in ENDS and f.begin <= end and f.end >= begin]
    drains = [fault.begin for fault in faults if fault.kind == "drain"]
    if drains and all(f.kind in ("drain", "down") and f.begin >= drains[0] for f in faults):
        sent = asked.sent or end
        has_arrived = sent < drains[0] - 0.2 or (begin + 1.5 < drains[0] and sent < drains[0] + 4.0)
        return has_arrived and end < drains[0] + 19.0 and not world.overlaps(begin, end, "stop")
    kills, ends = (sum(fault.kind == kind for fault in faults) for kind in ("kill", "down"))
    return (
        kills == 1
        and ends <= 1
        and all(f.who == "engine-0" and f.kind in ("kill", "down") for f in faults)
    )


def _may_loop(world: "World") -> bool:
    """Return whether closed loops are promised that nothing of theirs is refused.

    They are alone with polite clients, no setting shortens waits, each client has at most 64, and
    at most two clients share the time of their free requests.
    """
    kinds = Counter(event.kind for event in world.history.events if event.kind in KINDS)
    is_slow = world.overlaps(0.0, world.kernel.now, "slow", "stop", *ENDS[1:])
    has_others = world.history.settings or world.history.has_adapters
    are_alone = kinds.keys() <= {"loop", "polite"} and kinds["loop"] <= 2
    return are_alone and not has_others and not is_slow


def check_exit(world: "World", code: int) -> None:
    """Check the exit code: 1 only of a dead engine."""
    now = world.kernel.now
    if code == 2:
        if not world.overlaps(now - 1.0, now, "bad version"):
            world.fails("the process did not start")
        return
    # A run that began while the engine was slow may take minutes, and then counts as hung.
    if code == 1 and not world.overlaps(
        now - 120.0, now, "hang", "broken", "stop", "slow", "errors"
    ):
        world.fails("the process ended with 1 without a reason")


def check_readiness(world: "World", began: float, ended: float, status: int) -> None:
    """Check that a server was ready unless a fault says otherwise; its process may just end."""
    if "max_connections" in world.settings:
        return
    ends = world.server.is_dead or world.overlaps(ended, world.kernel.now, "down")
    if status != 200 and not ends and not world.overlaps(began - 1.0, ended, "stop", *ENDS):
        world.fails(f"readiness is {status} without a reason")
    drains = [fault.begin for fault in world.faults_of("drain") if fault.end > ended]
    begin = min(drains, default=began)
    if status == 200 and begin + 1.0 < began and not world.overlaps(begin - 1.0, ended, "stop"):
        world.fails("a server that drains says that it is ready")


def check_snapshots(world: "World") -> None:
    """Check that at most two versions have threads."""
    threads = [t for one in world.kernel.processes if one.is_alive for t in one.threads]
    watchdogs = sum(thread.name == "watchdog" for thread in threads)
    if watchdogs > 2:
        world.fails(f"{watchdogs} engines are open")


def check_running(world: "World") -> None:
    """Check that the server runs no request whose client has its end, or has left."""
    now = world.kernel.now
    if world.overlaps(now - 3.0, now, "stop", *ENDS):
        return
    world.recent = [one for one in world.recent if one.ended is None or one.ended > now - 1.0]
    asked = Counter(world.server.client(one.address) for one in world.recent)
    for queue in world.server.schedulers()[:1]:
        for client, held in queue._activity.requests.items():
            if held > asked[client]:
                world.fails(f"{held} requests of {client} run, who waits for {asked[client]}")


def check_accounts(world: "World") -> None:
    """Check that nothing is held when all clients have gone; a canary may run for a moment."""
    for _ in range(800):  # a run may go on whose requests have ended
        held = {name: number for name, number in _held(world).items() if number}
        if not held:
            return
        world.kernel.sleep(0.1)
    world.fails(f"something is held at the end: {held}")


def _held(world: "World") -> dict[str, int]:
    """Return what the accounts of the server hold."""
    server, held = world.server, Counter[str]()
    for queue in server.schedulers():
        fair = queue._queue
        held["queue"] += fair.tokens + len(fair._clients) + len(fair.lines)
        held["demand"] += len(fair.demand._tokens)
        held["requests of clients"] += len(queue._activity.requests)
        held["workers on long texts"] += len(queue._on_long_texts)
        held["watched runs"] += len(queue._watchdog._runs)
    for process, (service, http) in server.services.items():
        if not process.is_alive:
            continue
        for model in service.snapshot.by_name.values():
            if model.adapters is not None:
                held["adapters"] += sum(one.users for one in model.adapters._loaded.values())
            for link in getattr(model.queue, "_links", ()):
                held["requests to engines"] += link.tokens + len(link._pending)
        limits = service._limits
        for budget in (limits.bodies, limits.answers, limits.writers):
            held[budget._what] += budget._held + len(budget._holds) + len(budget._waiting)
        starts = service._starts
        held["starts"] += starts.waiting + len(starts.unsubmitted) + len(starts._lines)
        returns = service._returns
        held["refused"] += len(returns.refused) + sum(map(len, returns._due.values()))
        table, state = http._table, http.server_state
        held["connections"] += table._open + len(table._by_address) + len(table.idle)
        held["protocols"] += len(state.connections) + len(state.tasks)
        held["running"] += service.snapshot.running + service._metrics.in_flight
        held["work"] += len(service._work)
    return held


def check_metrics(world: "World") -> None:
    """Check that a process has counted each of its answers, and each token that ran, once."""
    starts_again = {"reload", "bad version", *ENDS}  # a reload forgets the series of a version
    if world.history.front_ends or starts_again & {fault.kind for fault in world.faults[1:]}:
        return
    text = probe(world, "/metrics").decode()
    counted, told = Counter[int](), Counter(asked.status for asked in world.requests)
    for status, number in re.findall(
        r'cloze_requests_total\{.*route="/embed",status="(\d+)".* (.*)', text
    ):
        counted[int(status)] += int(float(number))
    lost = told.pop(0, 0)  # they are counted if their heads had arrived
    seen = (counted | told).keys() - {503}  # the acceptor's refusals pass no route
    if any(not told[one] <= counted[one] <= told[one] + lost for one in seen):
        world.fails(f"clients got {told} and lost {lost}, and the metrics count {counted}")
    tokens = sum(map(float, re.findall(r"cloze_tokens_total\{.* (.*)", text)))
    if tokens != (ran := sum(run.tokens for run in world.server.runs)):
        world.fails(f"{ran} tokens ran, and the metrics count {tokens}")


def check_history(world: "World") -> None:
    """Check what only the whole history shows."""
    for asked in world.requests:
        if asked.ended is None:
            world.fails(f"never ended: {asked}")
    check_bulk(world)
    check_limits(world)
    check_polite(world)
    check_returns(world)


def check_limits(world: "World") -> None:
    """Check that few timed requests end late: one run in a hundred takes three times as long."""
    answered = sum(asked.status == 200 for asked in world.requests)
    if len(world.late) > 2 + answered / 150:
        world.fails(f"{len(world.late)} of {answered} accepted requests end late: {world.late[0]}")


def check_polite(world: "World") -> None:
    """Check that a polite client is seldom refused: one in ten requests, and two."""
    if world.longest_run_s > world.settings.get("request_timeout_ms", 30_000) / 5000:
        return
    for address in {asked.address for asked in world.requests if asked.kind == "polite"}:
        own = [asked for asked in world.requests if asked.address == address]
        full = "the queue holds"  # of an engine process that was killed
        statuses = [
            one.status
            for one in own
            if not one.adapter
            and not (full in one.error and world.overlaps(one.began - 10.0, one.began, "kill"))
        ]
        if (refused := statuses.count(429)) > 2 + len(statuses) / 10:
            world.fails(f"a polite client has {refused} of {len(statuses)} requests refused")


def check_waiting(world: "World", passed_s: float) -> None:
    """Check that a refused request does not wait as told while there is room for it.

    There is room if it could wait behind those of its client that are to come back before it.
    """
    queues, limits, now = world.server.schedulers(), world.server.waits, world.kernel.now
    crowds = [event for event in world.history.events if event.kind in CROWDS]  # they leave early
    before = Counter[tuple[str, LineKey]]()  # tokens by address and line
    for asked in sorted(world.waiting, key=lambda one: (one.ended or now) + one.told_s):
        # The door takes spaces in a body for tokens, and bulk gets what others leave.
        was_slower = world.overlaps((asked.ended or now) - 20.0, now, "slow", "stop", *ENDS)
        is_other = KINDS[asked.kind].padding or asked.kind == "bulk"
        if len(queues) != 1 or crowds or is_other or was_slower or "per minute" in asked.error:
            continue
        tokens, timeout_s = sum(asked.lengths), asked.limit_s or limits.timeout_s
        line, waiting = LineKey.of(tokens, asked.limit_s), queues[0]._queue.tokens
        client, ahead = world.server.client(asked.address), before[asked.address, line]
        wait = queues[0].expected_wait(client, line, tokens, ahead)
        before[asked.address, line] += tokens
        most = world.settings.get("max_queue_tokens", math.inf)
        is_full = wait.ahead + ahead + tokens > most - waiting - ahead
        if (waiting or ahead) and (wait.end_s > timeout_s / 2 or is_full):
            continue
        if limits.excess_s(wait, asked.limit_s, before=10**6) <= 0:
            asked.room_s += passed_s
            if asked.room_s > min(10.0 + asked.told_s / 2, ROOM_S):
                world.fails(f"told to wait {asked.told_s:.1f} s although there is room: {asked}")


def check_returns(world: "World") -> None:
    """Check that most of the requests are admitted that come back as they were told."""
    if world.overlaps(0.0, world.kernel.now, "slow", "stop", "errors", *ENDS[1:]):
        return
    if "max_connections" in world.settings:
        return
    back = [asked.status for asked in world.requests if asked.returns and asked.kind != "bulk"]
    if (refused := back.count(429)) > 5 + len(back) / 2:
        world.fails(f"{refused} of {len(back)} requests that came back as told are refused again")


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
            world.fails(
                f"bulk requests are owed {owed:.0f} of {waited:.0f} tokens at {run.ended:.3f}"
            )
            return


def watch_turns(world: "World") -> None:
    """Check, at each batch, that no client gets more tokens than one that waits meanwhile.

    The difference may be three batches and two texts. Others may run short texts beside long ones.
    Requests whose time is short go before turns.
    """
    take, most = FairQueue.take, 3 * 512 + 2 * world.longest_words
    ahead: dict[FairQueue, dict[str, Counter[str]]] = {}  # of each that waits: what others got

    def taking(queue: FairQueue, most_tokens: int, now: float, **options: Any) -> Batch:
        is_short = options["rate"] and queue.demand.slack_s(now, options["rate"]) < 0.05
        batch = take(queue, most_tokens, now, **options)
        if batch.is_bulk or is_short:
            ahead[queue] = {} if is_short else ahead.get(queue, {})
            return batch
        got, before = Counter[str](), ahead.get(queue, {})
        for queued in batch.encodings:
            got[queued.request.terms.client] += queued.tokens
        lines = (
            line
            for (_, is_bulk), one in queue._clients.items()
            if not is_bulk
            for line in one.lines.values()
        )
        waiting = {line.client.name for line in lines if line.tokens}
        more = Counter[str]() if "longest" in options else got
        ahead[queue] = {name: before.get(name, Counter()) + more for name in waiting}
        for name, others in ahead[queue].items():
            others.subtract(dict.fromkeys(others, got[name]))
            if others and max(others.values()) > most:
                world.fails(f"{name} waits, and another gets {max(others.values())} tokens more")
        return batch

    world.kernel.replace(FairQueue, "take", taking)
