"""What the pipeline submits of a request, and what it notes in the request."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cloze.service.batching.fair_queue import Submission, Terms
from cloze.service.core import ServedRequest
from cloze.service.errors import EngineFailed
from cloze.service.tasks import embed
from cloze.service.threads import run_anywhere
from tests.support.route_service import Service

pytestmark = pytest.mark.anyio


class Key:
    """A key that counts the tokens that are taken from it."""

    name = "k"
    taken = 0

    def take_tokens(self, tokens: int, now: float) -> None:
        self.taken += tokens


class Trace:
    parent = "00-a-b-01"


def run(service: Service, inputs: Any, request: ServedRequest) -> Any:
    [pipeline] = service.context.models.pipelines
    answer = pipeline.run(embed.TASK, inputs, embed.EmbedParameters(), request)
    return service._runner.run(asyncio.wait_for(answer, 5))


def test_a_request_is_submitted_on_its_own_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Submission] = []
    with Service(tmp_path) as service:
        submit = service.queues[0].submit
        monkeypatch.setattr(
            service.queues[0], "submit", lambda one: [submitted.append(one), submit(one)][1]
        )
        deadline = time.monotonic() + 60
        request = ServedRequest(
            deadline=deadline, client="c", stated_s=2.0, trace=Trace(), is_bulk=True
        )
        run(service, ["the", "of"], request)
    [submission] = submitted
    assert len(submission.outputs) == 2
    assert submission.terms == Terms(deadline, "c", 2.0, "00-a-b-01", is_bulk=True)


def test_a_result_is_noted_in_its_request(tmp_path: Path) -> None:
    key = Key()
    request = ServedRequest(body_bytes=10, key=key)
    with Service(tmp_path) as service:
        value = run(service, ["the", "the " * 45], request)
    assert value.shape == (2, 4)
    assert (request.texts, request.tokens, request.truncated) == (2, 13, 1)
    assert key.taken == 13
    assert not request.is_large
    assert request.queue_s + request.inference_s > 0
    assert request.began > 0


def test_a_request_that_fails_has_no_texts(tmp_path: Path) -> None:
    request = ServedRequest(key=Key())
    with Service(tmp_path) as service, pytest.raises(EngineFailed):
        run(service, "war", request)
    assert (request.texts, request.tokens) == (0, 3)


async def test_what_takes_long_runs_on_a_thread() -> None:
    own = threading.get_ident()
    assert await run_anywhere(True, threading.get_ident) == own
    assert await run_anywhere(False, threading.get_ident) != own
    assert await run_anywhere(False, max, 3, 4) == 4
