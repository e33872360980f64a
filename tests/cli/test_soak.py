"""The soak in short forms on a real server, and what each of its checks is there to find."""

from collections.abc import Callable, Sequence
from pathlib import Path

import orjson
import pytest

from cloze.bench.http_client import Request, Response
from cloze.bench.load import Answer, allow_many_connections
from lab.soak.answers import Answers
from lab.soak.faults import KINDS, Fault
from lab.soak.run import SoakPlan, soak
from lab.soak.verdict import GROWTH_MB, MORE_FILES, Check, Observed, checks
from lab.soak.watch import ProcessSample, Sample

SECONDS = 300.0


def failed(results: Sequence[Check]) -> list[str]:
    return [f"{check.name}: {check.figures}" for check in results if not check.passed]


@pytest.mark.slow
def test_a_killed_engine_process_costs_no_answer(tmp_path: Path) -> None:
    fault = {"faults": (KINDS["kill-engine"],), "fault_every_s": 60.0}
    plan = SoakPlan(seconds=7.0, rate=30, sample_every_s=1.0, requests=60, **fault)
    observed, results = soak(plan, tmp_path)
    assert not failed(results)
    assert [fault.role for fault in observed.faults] == ["engine-0"]
    pids = [
        process.pid
        for sample in observed.samples
        for process in sample.processes
        if process.role == "engine-0"
    ]
    assert len(set(pids)) == 2, "it was killed"
    assert not observed.answers.lost_at
    document = orjson.loads((tmp_path / "soak.json").read_bytes())
    assert sum(document["outcomes"].values()) == observed.sent
    assert "| kill-engine | engine-0 |" in (tmp_path / "soak.md").read_text()


@pytest.mark.slow
def test_every_fault_in_turn(tmp_path: Path) -> None:
    allow_many_connections()
    kinds = tuple(kind for name, kind in KINDS.items() if name != "reload")
    plan = SoakPlan(seconds=80.0, rate=60, faults=kinds, fault_every_s=8.0, sample_every_s=2.0)
    observed, results = soak(plan, tmp_path)
    assert not failed(results)
    assert {fault.kind for fault in observed.faults} == set(kinds)


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    _, results = soak(SoakPlan(seconds=60.0, frontends=0, rate=60, sample_every_s=2.0), tmp_path)
    assert not failed(results)


# ---- the checks, on made observations ------------------------------------------------------------


def process(
    role: str = "engine-0", pid: int = 2, mb: float = 100.0, files: int = 20
) -> ProcessSample:
    return ProcessSample(role, pid, mb, files, 4)


def answers(count: int = 100) -> Answers:
    made = Answers([Request(b"", group="embed"), Request(b"", group="bad")], [200, 422])
    for number in range(count):
        made.add(Answer(0, number * 3.0, 0.1, Response(200, b'[{"score": 0.5}]')))
    return made


def observation(
    made: Answers | None = None,
    *,
    sent: int = 100,
    faults: Sequence[Fault] = (),
    mb: Callable[[float], float] = lambda _: 100.0,
    files_after: int = 20,
    log: str = "",
) -> Observed:
    samples = [Sample(at, (process(mb=mb(at)),)) for at in range(0, int(SECONDS), 5)]
    rest = (Sample(0.0, (process(),)), Sample(SECONDS, (process(files=files_after),)))
    return Observed(SECONDS, 60.0, sent, made or answers(), faults, samples, rest, log)


def with_answer(status: int, body: bytes, number: int = 0, at_s: float = 150.0) -> Answers:
    made = answers(99)
    made.add(Answer(number, at_s, 0.1, Response(status, body) if status else None))
    return made


def test_a_soak_without_a_fault_passes() -> None:
    assert not failed(checks(observation()))
    almost = with_answer(200, b'[{"score": 0.50000001}]')
    assert not failed(checks(observation(almost)))
    assert not failed(checks(observation(with_answer(422, b"{}", number=1))))
    assert not failed(checks(observation(mb=lambda at: 100 + (at > 150) * GROWTH_MB)))


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (with_answer(200, b'[{"score": 0.51}]'), "answers equal the first answer"),
        (with_answer(500, b"{}"), "no unexpected status"),
        (with_answer(0, b""), "connections end only with their front end"),
        (answers(99), "every request settled"),
        (Answers([], []), "at least 50% right answers"),
    ],
)
def test_a_wrong_answer_is_noticed(made: Answers, name: str) -> None:
    found = failed(checks(observation(made)))
    assert [line for line in found if line.startswith(name)], found


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ({"mb": lambda at: 100 + at / 4}, "memory of engine-0, last third"),
        ({"files_after": 21 + MORE_FILES}, "open files at rest"),
        ({"log": "x\nTraceback (most recent call last):\n"}, "no traceback"),
    ],
)
def test_a_leak_or_a_traceback_is_noticed(made: dict[str, object], name: str) -> None:
    slow_leak = observation(**made)  # type: ignore[arg-type]
    assert [line for line in failed(checks(slow_leak)) if line.startswith(name)]
