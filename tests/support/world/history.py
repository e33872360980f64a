"""Histories: clients and faults of one seed, how a world plays them, and the shortest one."""

import gc
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tests.support.world import promises
from tests.support.world.clients import CROWDS, KINDS, Asked, Client, key_name, probe
from tests.support.world.kernel import START_S, Kernel, Process, installed
from tests.support.world.processes import Supervised, processes_installed
from tests.support.world.server import Costs, Server

_WATCH_S = 0.5
"""Seconds between looks at readiness, snapshots and waiting clients."""


@dataclass(frozen=True, order=True)
class Event:
    """A client that begins, or a fault.

    Attributes:
        at: seconds after the start.
        kind: one of `clients.KINDS`, or the name of a method of `Faults`.
        seconds: how long.
        many: connections of a client.
    """

    at: float
    kind: str
    seconds: float = 0.0
    many: int = 1

    def __str__(self) -> str:
        many = f" on {self.many} connections" if self.kind in KINDS else ""
        return f"at {self.at:g} s: {self.kind}{many} for {self.seconds:g} s"


@dataclass(frozen=True)
class History:
    """What happens in one world.

    Attributes:
        tokens_per_s: of one worker of the engine.
        turn_s: processor time of the event loop per callback.
        front_ends: whether a supervisor runs an engine process and two front ends.
        has_keys: whether clients have API keys.
        has_adapters: whether requests may ask for adapters.
        dimensions: of the vectors; many for large answers.
        settings: of the server.
    """

    seed: int
    events: tuple[Event, ...]
    seconds: float
    tokens_per_s: float
    turn_s: float = 0.0
    front_ends: bool = False
    has_keys: bool = False
    has_adapters: bool = False
    dimensions: int = 4
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        lines = "\n".join(f"  {event}" for event in self.events)
        return (
            f"seed {self.seed}: {self.seconds:g} s, {self.tokens_per_s:.0f} tokens per second, "
            f"{self.turn_s * 1e6:.0f} us per callback, "
            f"{'front ends, ' * self.front_ends}{'keys, ' * self.has_keys}"
            f"{'adapters, ' * self.has_adapters}settings {dict(self.settings)}\n{lines}"
        )


FAULTS = (
    "slow", "errors", "hang", "broken", "stop", "kill", "reload", "bad_reload", "full_disk",
    "clock_jump", "drain",
)  # fmt: skip


def drawn(seed: int) -> History:
    """Return the history of a seed."""
    draw = random.Random(seed)
    seconds = float(draw.randint(10, 60))
    rate = 10 ** draw.uniform(2.5, 3.0)
    events = []
    for _ in range(draw.choice((1, 2, 2, 3, 4))):
        kind = draw.choice([kind for kind in KINDS if kind not in (*CROWDS, "slow reader")])
        many = {
            "polite": 1, "loop": draw.choice((2, 16, 64)), "storm": draw.randint(10, 90),
            "told": draw.randint(40, 120), "slow writer": draw.randint(1, 20),
        }.get(kind, draw.randint(1, 8))  # fmt: skip
        at = draw.uniform(0, seconds * 0.6)
        events.append(Event(round(at, 1), kind, round(draw.uniform(2, seconds - at), 1), many))
    if draw.random() < 0.7:
        events.append(Event(0.0, "polite", seconds))
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3))):
        kind, at = draw.choice(FAULTS), draw.uniform(0.5, seconds)
        events.append(Event(round(at, 2), kind, round(draw.uniform(0.5, 12), 1)))
    settings: dict[str, Any] = {}
    if draw.random() < 0.2:
        settings["max_queue_wait_ms"] = draw.choice((0, 300, 1500))
    if draw.random() < 0.3:
        settings["max_bodies_bytes"] = 2**18 * draw.choice((2, 3, 4))
        settings["max_request_bytes"] = 2**19
    if draw.random() < 0.2:
        settings["drain_s"] = draw.choice((0.5, 3.0))
    if draw.random() < 0.2:
        settings["max_connections"] = draw.choice((20, 50))
    if draw.random() < 0.3:
        settings["request_timeout_ms"] = draw.choice((4000, 10_000))
    turn_s = draw.choice((0.0, 0.0, 20e-6, 200e-6))
    if (
        are_loops := random.Random(f"loops {seed}").random() < 0.1
    ):  # which are promised to be refused nothing
        events = [
            replace(event, kind="loop", many=min(event.many, 32)) if event.kind in KINDS else event
            for event in events
            if event.kind not in ("slow", "errors")
        ]
        settings.clear()
    front_ends, keys = draw.random() < 0.3, draw.random() < 0.3
    draw = random.Random(f"more {seed}")
    for _ in range(draw.choice((0, 0, 0, 1, 2, 3)) if not are_loops else 0):
        at, many = round(draw.uniform(0, seconds * 0.6), 1), draw.randint(4, 50)
        events.append(Event(at, draw.choice(CROWDS), round(draw.uniform(2, 10), 1), many))
    if draw.random() < 0.1:
        at = round(draw.uniform(2.0, seconds), 2)
        events.append(Event(at, "freeze", round(draw.uniform(1, 30), 1)))
    adapters = not front_ends and draw.random() < 0.2
    dimensions, draw = 4, random.Random(f"readers {seed}")
    if not are_loops and draw.random() < 0.1:
        dimensions = 2000
        at, many = round(draw.uniform(0, seconds * 0.6), 1), draw.randint(2, 12)
        events.append(Event(at, "slow reader", round(draw.uniform(5, 20), 1), many))
        settings["max_answers_bytes"] = 2**18 * draw.choice((1, 2, 4))
    draw = random.Random(f"queue {seed}")
    if not are_loops and draw.random() < (0.3 if front_ends else 0.1):
        settings["max_queue_tokens"] = 4000
        events += [Event(round(draw.uniform(2.0, seconds * 0.7), 2), "kill_engine")] * front_ends
    return History(
        seed, tuple(sorted(events)), seconds, rate, turn_s, front_ends, keys, adapters, dimensions,
        tuple(settings.items()),
    )  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A time in which a promise may not hold for a reason; without an end it goes on."""

    kind: str
    begin: float
    end: float = float("inf")
    who: str = ""


class World:
    """One history while it is played.

    Attributes:
        failures: the promises that were broken.
        requests: all requests that clients began.
        recent: those that had not ended a second before the last look.
        waiting: refused requests whose clients wait as they were told.
        last: the last request of each connection that asks.
        late: accepted requests with a stated limit that got 504 without a reason.
        faults: what was done to the server, and what its process did.
        readiness: (begin, end, status) of each probe of /readyz.
    """

    def __init__(self, history: History) -> None:
        self.history = history
        self.kernel = Kernel(history.seed)
        self.kernel.on_error = self.fails
        self.failures: list[str] = []
        self.requests: list[Asked] = []
        self.recent: list[Asked] = []
        self.waiting: list[Asked] = []
        self.faults: list[Fault] = []
        self.last: dict[str, Asked] = {}
        self.late: list[Asked] = []
        self.readiness: list[tuple[float, float, int]] = []
        self.settings = dict(history.settings)
        self._hash = hashlib.sha256()
        self.trace: list[str] = []

    @property
    def lasted_s(self) -> float:
        """The simulated seconds so far."""
        return self.kernel.now - START_S

    # What parts of the world report.

    def note(self, text: str) -> None:
        """Add a line to the trace, whose hash is that of the history."""
        line = f"{self.lasted_s:.6f} {text}"
        self._hash.update(line.encode())
        self.trace.append(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def fails(self, reason: str) -> None:
        """Note a broken promise; the history ends."""
        self.note(f"FAILS {reason}")
        self.failures.append(f"{self.lasted_s:.3f} s: {reason}")
        self.kernel.has_ended = True

    def asked(self, asked: Asked) -> int:
        asked.run_s = self.server.costs.seconds(asked.lengths)
        self.requests.append(asked)
        self.recent.append(asked)
        return len(self.requests)

    def answered(self, asked: Asked) -> None:
        self.note(str(asked))
        promises.check_answer(self, asked)

    def begin_fault(self, kind: str, seconds: float = float("inf"), who: str = "") -> None:
        self.note(f"fault {kind} {who}")
        self.faults.append(Fault(kind, self.kernel.now, self.kernel.now + seconds, who))

    def end_faults(self, *kinds: str, who: str = "") -> None:
        """End faults that have no end yet."""
        for index, fault in enumerate(self.faults):
            if fault.kind in kinds and fault.who == who and fault.end == float("inf"):
                self.faults[index] = replace(fault, end=self.kernel.now)

    def faults_of(self, kind: str) -> list[Fault]:
        """Return the faults of a kind so far."""
        return [fault for fault in self.faults if fault.kind == kind]

    def overlaps(self, begin: float, end: float, *kinds: str) -> bool:
        """Return whether one of some faults was there in a time."""
        return any(f.kind in kinds and f.begin <= end and f.end >= begin for f in self.faults)

    @cached_property
    def longest_words(self) -> int:
        """The most words of a text of a client."""
        kinds = [KINDS[event.kind] for event in self.history.events if event.kind in KINDS]
        return max((kind.words[1] for kind in kinds), default=0)

    @cached_property
    def longest_run_s(self) -> float:
        """The longest time of a run, of the longest text of a client."""
        return self.server.costs.seconds([self.longest_words])

    def _server_noted(self, what: str, name: str, value: Any) -> None:
        self.note(f"{name} {what} {value}")
        if what == "ready":
            self.end_faults("down", "kill", who=name)
            self.end_faults("drain")
        elif what == "ended":
            self.begin_fault("down", who=name)
            promises.check_exit(self, value)

    # The history.

    def play(self) -> None:
        """Let the history happen, and check the promises."""
        history = self.history
        made = Supervised if history.front_ends else Server
        with installed(self.kernel), processes_installed(self.kernel, lambda: self.server):
            for name in ("server", "frontend-0", "frontend-1", "engine-0")[
                :: 1 if history.front_ends else 4
            ]:
                self.begin_fault("down", who=name)
            self.server = made(
                self.kernel, Costs(history.tokens_per_s), history.turn_s, self._server_noted,
                self.fails, dict(history.settings), self._keys(), history.has_adapters,
                history.dimensions,
            )  # fmt: skip
            try:
                self.kernel.spawn(self._direct)
                self.kernel.run()
                if not self.kernel.has_ended:
                    self.fails("the history does not end")
            finally:
                self.server.remove()

    def _keys(self) -> dict[str, bool]:
        """Return the keys of the clients; those that state time limits have a limit of requests."""
        events = enumerate(self.history.events) if self.history.has_keys else ()
        keys = {key_name(f".{number}"): event.kind == "limited" for number, event in events}
        return keys and {"key-metrics": False, **keys}

    def _direct(self) -> None:
        """Start the clients and the faults in their time, and end the server."""
        kernel, history = self.kernel, self.history
        while not self.server.is_ready:
            kernel.sleep(0.01)
        start = kernel.now
        promises.watch_turns(self)
        watching = kernel.spawn(self._watch)
        clients = []
        for number, event in enumerate(history.events):
            kernel.sleep(start + event.at - kernel.now)
            if event.kind not in KINDS:
                clients.append(kernel.spawn(getattr(self, f"_{event.kind}"), event.seconds))
                continue
            for index in range(event.many):
                seed = f"{history.seed} {event} {index}"
                client = Client(self, event.kind, f"10.1.0.{number}", seed)
                clients.append(kernel.spawn(client.run, kernel.now + event.seconds))
        for thread in clients:
            thread.join()
        kernel.sleep(start + history.seconds - kernel.now)
        while self.overlaps(kernel.now, kernel.now, "down", "drain", "stop"):
            kernel.sleep(0.1)
        kernel.sleep(3.0)  # until what was lost is noticed
        self.is_watching = False
        watching.join()
        kernel.sleep(0.5)
        promises.check_accounts(self)
        promises.check_metrics(self)
        self.server.is_ending = True
        self._drain(0)
        self.server.keeper.join()
        promises.check_history(self)
        self.kernel.has_ended = True

    is_watching = True

    def _watch(self) -> None:
        """Ask for readiness, and count the snapshots."""
        kernel = self.kernel
        while self.is_watching:
            began = kernel.now
            status = int(probe(self, "/readyz").split()[1])
            for before in self.readiness[-1:]:
                promises.check_readiness(self, *before)
            self.readiness.append((began, kernel.now, status))
            promises.check_snapshots(self)
            promises.check_waiting(self, kernel.now - began + _WATCH_S)
            if len(self.readiness) % 4 == 0:
                promises.check_running(self)
            kernel.sleep(_WATCH_S)
        for last in self.readiness[-1:]:
            promises.check_readiness(self, *last)

    # The faults.

    def _slow(self, seconds: float) -> None:
        self.begin_fault("slow", seconds)
        self.server.costs.slowness = 10.0
        self.kernel.sleep(seconds)
        self.server.costs.slowness = 1.0

    def _errors(self, seconds: float) -> None:
        self.begin_fault("errors", seconds)
        self.server.costs.error_share = 0.3
        self.kernel.sleep(seconds)
        self.server.costs.error_share = 0.0

    def _hang(self, _: float) -> None:
        """Let the next run hang."""
        self.begin_fault("hang")
        self.server.costs.hangs += 1
        self._wait_for_end()
        self.server.costs.hangs = 0
        self.end_faults("hang")

    def _broken(self, _: float) -> None:
        """Let all runs fail, the golden outputs too."""
        self.begin_fault("broken")
        self.server.costs.is_broken = True
        self._wait_for_end()
        self.server.costs.is_broken = False
        self.end_faults("broken")

    def _wait_for_end(self) -> None:
        """Wait until a process that has been ready ends."""
        while not self.server.is_ready:
            self.kernel.sleep(0.05)
        process = self.server.engine_process()
        began = self.kernel.now
        self.server.hung, self.server.dead_at = None, began + promises.DEAD_S
        while process.is_alive and self.kernel.now < self.server.dead_at:
            process.ended.wait(1.0)
            queues = self.server.schedulers()
            if self.server.hung and all(q._engine is not self.server.hung for q in queues):
                return  # a reload has replaced it
        if process.is_alive and not self.overlaps(began, self.kernel.now, "stop", "slow"):
            self.fails("a dead engine was not noticed")

    def _stop(self, seconds: float) -> None:
        process = self.server.victim()
        if process is not None:
            self.begin_fault("stop", seconds + 0.5)
            self.server.dead_at += seconds
            self.kernel.stop(process)
            self.kernel.sleep(seconds)
            is_silent = seconds > promises.SILENT_S and process.stops and process.is_alive
            began = self.kernel.now - seconds
            stops = [f for f in self.faults_of("stop") if f.end >= began]  # the supervisor too?
            if self.history.front_ends and is_silent and len(stops) == 1:
                self.fails(f"{process.name} was stopped for {seconds} s and is not replaced")
            self.kernel.go_on(process)

    def _freeze(self, seconds: float) -> None:
        """Stop all processes, as a paused machine does; none may end by it."""
        processes = [one for one in self.kernel.processes[1:] if one.is_alive]
        began = self.kernel.now
        self.begin_fault("stop", seconds + 0.5)
        self.server.dead_at += seconds
        for process in processes:
            self.kernel.stop(process)
        self.kernel.sleep(seconds)
        for process in processes:
            self.kernel.go_on(process)
        self.kernel.sleep(3.0)
        ended = [one.name for one in processes if not one.is_alive]
        if ended and not self.overlaps(began - 10.0, self.kernel.now, *promises.ENDS[1:], "errors"):
            self.fails(f"{ended} ended after all processes had been stopped")

    def _kill(self, _: float) -> None:
        if (process := self.server.victim()) is not None:
            self._kill_process(process)

    def _kill_engine(self, _: float) -> None:
        """Kill the engine process; requests of its queue outlive it."""
        if (process := self.server.engine_process()).is_alive:
            self._kill_process(process)

    def _kill_process(self, process: Process) -> None:
        self.begin_fault("kill", who=process.name)
        self.kernel.kill(process)

    def _reload(self, _: float) -> None:
        self.begin_fault("reload", 0.0)
        self.server.publish()
        self.server.hang_up()

    def _bad_reload(self, _: float) -> None:
        """Publish a version whose engine does not open, and ask to serve it; then a good one."""
        self.begin_fault("bad version")
        self.server.publish(is_bad=True)
        self.server.hang_up()
        self.kernel.sleep(2.0)
        self.server.publish()
        self.end_faults("bad version")

    def _full_disk(self, seconds: float) -> None:
        """Cut off the files of a new version, and the keys; then only temporary files fail.

        Then a good version is served, except with adapters, which need the disk.
        """
        kernel, server, adapters = self.kernel, self.server, self.history.has_adapters
        began = kernel.now
        self.begin_fault("bad version", who="disk")
        server.disk.is_full = True
        name, _, version = server.publish().partition("@")
        (server.store / "models" / name / version / "golden.json").write_text("")
        server.keys_file.write_text("[key-0]\nsha256 =")
        server.hang_up()
        kernel.sleep(2.0)
        server.write_keys()
        reference = server.publish()
        if not adapters:
            self.end_faults("bad version", who="disk")
        server.hang_up()
        kernel.sleep(seconds)
        is_alone = not self.overlaps(began, kernel.now, "slow", "stop", *promises.ENDS)
        changes = [f for f in self.faults if f.kind in ("bad version", "reload")]
        is_alone &= sum(fault.end > began - 45.0 for fault in changes) == 1  # others end late
        is_alone &= seconds > 1.0 and not self.history.front_ends  # which do not reload
        if is_alone and server.serves(reference) == adapters:
            self.fails(f"with a full disk, {reference} is {'' if adapters else 'not '}served")
        server.disk.is_full = False
        self.end_faults("bad version", who="disk")

    def _clock_jump(self, seconds: float) -> None:
        self.note("the wall clock jumps")
        self.kernel.wall_s += 3600 * (seconds - 6)

    def _drain(self, _: float) -> None:
        if self.server.is_ready:
            self.begin_fault("drain")
            self.server.terminate()


def play(history: History) -> World:
    """Return the world after a history."""
    world = World(history)
    world.play()
    return world


def worlds(seeds: Sequence[int]) -> Iterator[World]:
    """Yield the world after each history; 200 hold 1 GiB, and to collect one takes 15 ms."""
    gc.freeze()
    gc.disable()
    try:
        for seed in seeds:
            yield play(drawn(seed))
            if seed % 200 == 0:
                gc.collect()
    finally:
        gc.enable()


def shortest(history: History, fails: Callable[[History], bool]) -> History:
    """Return the shortest history that still fails: without events, then with smaller ones.

    Delta debugging (Zeller and Hildebrandt 2002, algorithm ddmin) over the list of events.
    """
    parts = 2
    while len(history.events) > 1:
        size = -(-len(history.events) // parts)
        for begin in range(0, len(history.events), size):
            kept = history.events[:begin] + history.events[begin + size :]
            if kept and fails(smaller := replace(history, events=kept)):
                history, parts = smaller, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(history.events))
    for index in range(len(history.events)):
        for smaller in _smaller(history, index):
            while fails(smaller) and smaller != history:
                history = smaller
                smaller = next(iter(_smaller(history, index)), history)
    return history


def _smaller(history: History, index: int) -> Sequence[History]:
    """Return a history with fewer connections of one event, and one with less time."""
    event = history.events[index]
    made = []
    for change in ({"many": event.many // 2}, {"seconds": round(event.seconds / 2, 1)}):
        small = replace(event, **change)  # type: ignore[arg-type]
        if small.many and small.seconds >= 0.5 and small != event:
            events = (*history.events[:index], small, *history.events[index + 1 :])
            made.append(replace(history, events=events))
    return made
