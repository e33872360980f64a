"""The whole service in simulated time: histories keep the promises, and a seed is one history."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cloze.service.batching.fair_queue import FairQueue, Submission
from tests.support.world.__main__ import describe
from tests.support.world.history import Event, History, drawn, play, shortest
from tests.support.world.past_faults import changed_sources, find, past_faults

FAILED = {
    10: "a refused request was told to wait for a minute, and had room after 15 s",
    525: "who had short texts beside long ones lost the turn of 2,676 tokens",
    967: "connections that had come back as told were due for ever, before all others",
    1212: "a body waited for room at each of its parts, for 4 s in all",
    1259: "front ends refused for 20 s what an idle engine process would have run",
}
"""Seeds whose histories broke a promise, with what was wrong."""

SEEDS = (*FAILED, *range(1001, 1121))
"""The histories of `make test`, which take about 35 s of one core."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.timeout(600)
def test_histories_keep_the_promises() -> None:
    for seed in SEEDS:
        if play(drawn(seed)).failures:
            pytest.fail(describe(drawn(seed)))


def test_the_past_faults_are_changes_of_the_code_of_now() -> None:
    for fault in past_faults():
        for file, source in changed_sources(fault).items():
            compile(source, file, "exec")


def test_a_past_fault_is_found() -> None:
    found = find(past_faults()[0], range(1, 31))
    assert found["seed"] is not None
    assert "ended with 1 without a reason" in found["shows"]


DIGESTS = """
import json, logging, sys
from tests.support.world.history import drawn, play
logging.disable(logging.CRITICAL)
print(json.dumps([play(drawn(seed)).digest for seed in json.loads(sys.argv[1])]))
"""


def test_a_seed_is_one_history() -> None:
    """The order of sets differs between processes, and between two runs in one process."""
    seeds = [3, 7, 43, 131, 222]
    told = [play(drawn(seed)).digest for seed in (*seeds, *seeds)]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", DIGESTS, json.dumps(seeds)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert told[:5] == told[5:] == json.loads(done.stdout)
    assert len(set(told)) == 5


def test_the_shortest_history_has_only_what_fails() -> None:
    clients = [Event(float(at), "polite", 4.0) for at in range(6)]
    history = History(1, (*clients, Event(3.0, "kill"), Event(6.0, "drain")), 10.0, 100.0)

    def fails(smaller: History) -> bool:
        kinds = [event.kind for event in smaller.events]
        return "kill" in kinds and kinds.count("polite") >= 2

    least = shortest(history, fails)
    assert sorted(event.kind for event in least.events) == ["kill", "polite", "polite"]
    assert max(event.seconds for event in least.events if event.kind == "polite") == 0.5


def test_a_fault_of_the_server_is_found_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are cancelled stay in the queue's account."""
    forget = FairQueue.forget

    def keeps_some(self: FairQueue, request: Submission) -> None:
        line = self.lines[request]
        forget(self, request)
        if request.cancelled():
            self.lines[request] = line

    monkeypatch.setattr(FairQueue, "forget", keeps_some)
    history = replace(drawn(8), events=(Event(0.0, "leaving", 5.0, 3), Event(1.0, "polite", 5.0)))
    told = describe(history)
    assert "something is held at the end: {'queue'" in told
    assert "leaving" in told
    assert "polite" not in told
