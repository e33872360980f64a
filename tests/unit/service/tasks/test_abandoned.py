"""Work on threads ends soon after its client has gone: long tasks ask between their parts."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from anyio import CancelScope

from cloze.service.http.body import BodyLimits, load
from cloze.service.tasks.answer_spans import QaOptions, Question, SpanMemory, best_answers
from cloze.service.tasks.patterns import find
from cloze.service.tasks.token_ids import DECODE, TOKENIZE, DecodeParameters, TokenizeParameters
from cloze.service.threads import run_on_thread
from tests.support.task_model import CONTEXT, ids

READY = TOKENIZE.prepare("the door", TokenizeParameters(), CONTEXT)
DECODING = DECODE.prepare(ids("the door"), DecodeParameters(), CONTEXT)
QUESTION = Question("red", CONTEXT.tokenizer.spans("red"), 1, [(0, 1)], np.arange(1))


@pytest.mark.parametrize(
    "work",
    [
        lambda: TOKENIZE.prepare("the", TokenizeParameters(), CONTEXT),
        lambda: TOKENIZE.decode(READY.state, [], CONTEXT),
        lambda: DECODE.decode(DECODING.state, [], CONTEXT),
        lambda: best_answers(
            QUESTION, [np.zeros((2, 2), np.float32)], QaOptions(12, 3, 4), SpanMemory()
        ),
        lambda: list(find("4111 1111 1111 1111", "CARD")),
        lambda: list(find("+49 30 123456", "PHONE")),
        lambda: list(find("no address", "EMAIL")),
        lambda: load(b"[1, 2, 3]", BodyLimits(10**9, 10**9, 10**9), 3),
    ],
)
def test_work_whose_client_has_gone_ends(work: Callable[[], Any]) -> None:
    work()
    gone, has_ended = threading.Event(), threading.Event()
    ends: list[type[BaseException] | None] = []

    def run(leave: Callable[[], Any]) -> None:
        leave()
        gone.wait(10)
        try:
            work()
            ends.append(None)
        except asyncio.CancelledError as error:
            ends.append(type(error))
        finally:
            has_ended.set()

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        with CancelScope() as scope:
            await run_on_thread(run, lambda: loop.call_soon_threadsafe(scope.cancel))
        assert scope.cancelled_caught
        gone.set()
        assert await asyncio.to_thread(has_ended.wait, 10)

    asyncio.run(leave())
    assert ends == [asyncio.CancelledError]
