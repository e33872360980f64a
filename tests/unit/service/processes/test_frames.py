"""Messages between processes arrive as they were sent, field by field."""

import asyncio
import socket
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import ArrayResult
from cloze.model_store.heads.embedding import EmbeddingRequest
from cloze.model_store.heads.entities import EntityRequest
from cloze.model_store.heads.masked_lm import MaskedLMRequest, MaskedLMResult
from cloze.service import errors
from cloze.service.batching import fair_queue
from cloze.service.core import BatchResult
from cloze.service.errors import Overloaded, Rejection
from cloze.service.processes import frames
from cloze.service.processes.frames import (
    MALFORMED,
    Answer,
    Cancel,
    Greeting,
    Run,
    decode_answer,
    decode_request,
    encode,
    encode_answer,
    encode_run,
)

pytestmark = pytest.mark.anyio

SHARED = {"embedding": EmbeddingRequest(4)}
MASKED = {"masked_lm": MaskedLMRequest([1, 2], 3, [7])}


def encoding(ids: Sequence[int], types: Sequence[int], requests: dict) -> Encoding:
    return Encoding(np.array(ids, np.int32), np.array(types, np.int32), requests)


ENCODINGS = [
    encoding([1, 2, 3], [0, 0, 1], SHARED),
    encoding([4, 5], [1, 1], MASKED),
    encoding([6], [0], SHARED),
]


def arrived(run: Run) -> Run:
    return decode_request(encode_run(run))


WAIT = fair_queue.ExpectedWait(2.5, 0.25)


def answered(answer: Answer) -> Answer:
    return decode_answer(encode_answer(answer))


def test_every_field_of_a_run_arrives() -> None:
    terms = fair_queue.Terms(12.5, "someone", 4.5, "00-ab-cd-01", True, True)
    assert not [value for value in terms[1:] if value in terms._field_defaults.values()]
    decoded = arrived(Run(11, 3, terms, ENCODINGS))
    assert (decoded.number, decoded.model, decoded.terms) == (11, 3, terms)
    encodings = decoded.encodings
    assert [e.input_ids.tolist() for e in encodings] == [[1, 2, 3], [4, 5], [6]]
    assert [e.token_type_ids.tolist() for e in encodings] == [[0, 0, 1], [1, 1], [0]]
    assert [dict(e.requests) for e in encodings] == [SHARED, MASKED, SHARED]


def test_vectors_arrive_once_for_all_encodings_that_share_them() -> None:
    shared, own = np.random.default_rng(0).random((2, 500, 8)).astype(np.float32)
    requests = [EntityRequest((1,), vectors=shared) for _ in range(4)]
    requests += [EntityRequest((1, 2), vectors=own), EntityRequest((1,), (2, 3))]
    encodings = [encoding([1, 2], [0, 0], {"entities": request}) for request in requests]
    message = encode_run(Run(1, 0, fair_queue.Terms(1.0), encodings))
    assert len(message) < 2 * shared.nbytes + 1000
    decoded = decode_request(message)
    for sent, received in zip(requests, decoded.encodings, strict=True):
        asked = received.requests["entities"]
        assert (asked.words, asked.labels) == ([*sent.words], [*sent.labels])
        if sent.vectors is None:
            assert asked.vectors is None
        else:
            np.testing.assert_array_equal(asked.vectors, sent.vectors)  # type: ignore[arg-type]


def test_a_greeting_and_a_cancellation_arrive() -> None:
    greeting = Greeting({"bert@1": "fp32", "qa@2": "int8"})
    assert decode_answer(encode(greeting)) == greeting
    assert decode_request(encode(Cancel(7))) == Cancel(7)


def test_results_arrive_at_their_encodings() -> None:
    masks = MaskedLMResult(
        np.array([[3.0, 2.0]], np.float32),
        np.array([[30, 20]]),
        np.array([4.0], np.float32),
        np.array([[0.5]], np.float32),
    )
    tokens = [ArrayResult(np.full((n, 2), n, np.float32)) for n in (3, 1)]
    outputs = [
        {"token_embedding": tokens[0], "masked_lm": masks},
        {},
        {"token_embedding": tokens[1], "embedding": ArrayResult(np.ones(2, np.float32))},
    ]
    answer = answered(Answer(5, BatchResult(outputs, 0.25, 0.75), WAIT))
    assert (answer.number, answer.wait) == (5, WAIT)
    assert (answer.outcome.queue_s, answer.outcome.inference_s) == (0.25, 0.75)
    first, second, third = answer.outcome.outputs
    assert first.keys() == {"token_embedding", "masked_lm"}
    assert second == {}
    assert third.keys() == {"token_embedding", "embedding"}
    assert first["token_embedding"].array.tolist() == [[3, 3]] * 3
    assert third["token_embedding"].array.tolist() == [[1, 1]]
    assert first["masked_lm"].top_ids.tolist() == [[30, 20]]
    assert first["masked_lm"].top_ids.dtype == np.int64
    assert first["masked_lm"].logsumexp.tolist() == [4]
    assert first["masked_lm"].target_logits.tolist() == [[0.5]]


def test_errors_keep_their_kind_and_refusals_their_reason_and_time() -> None:
    for error in (*(Overloaded("why", 17, reason) for reason in Rejection),
                  *(kind("why") for kind in (errors.DeadlineExceeded, errors.EngineDead))):  # fmt: skip
        answer = answered(Answer(9, error, WAIT))
        assert type(answer.outcome) is type(error)
        assert (str(answer.outcome), answer.number, answer.wait) == ("why", 9, WAIT)
        if isinstance(answer.outcome, Overloaded) and isinstance(error, Overloaded):
            assert (answer.outcome.retry_after_s, answer.outcome.reason) == (17, error.reason)
    message = encode_answer(Answer(1, errors.DeadlineExceeded("late")))
    for unknown in ("KeyError", "ServiceErrorx"):
        with pytest.raises(MALFORMED):
            decode_answer(changed(message, "DeadlineExceeded", unknown))
    message = encode_answer(Answer(1, Overloaded("full", 1.0, Rejection.MEMORY)))
    with pytest.raises(MALFORMED):
        decode_answer(changed(message, "memory", "memoryx"))


def changed(message: bytes, old: object, new: object) -> bytes:
    """Return a message with another value in the place of one value."""
    fields = msgspec.msgpack.decode(message)
    lists = [fields, *(field for field in fields if isinstance(field, list))]
    values = next(values for values in lists if old in values)
    values[values.index(old)] = new
    return msgspec.msgpack.encode(fields)


RUN = encode_run(Run(1, 77, fair_queue.Terms(2.0), ENCODINGS[:2]))
MODEL, LENGTHS, REQUEST_OF = 77, [3, 2], [0, 1]
IDS = np.array([1, 2, 3, 4, 5], np.int32).tobytes()
TYPES = np.array([0, 0, 1, 1, 1], np.int32).tobytes()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (MODEL, -1),
        (LENGTHS, []),
        (LENGTHS, [3, 3]),
        (LENGTHS, [5, 0]),
        (REQUEST_OF, [0]),
        (REQUEST_OF, [0, 1, 1]),
        (REQUEST_OF, [0, 2]),
        (REQUEST_OF, [0, -1]),
        (IDS, bytes(4 * 6)),
        (TYPES, bytes(4 * 4)),
        (TYPES, bytes(3)),
    ],
)
def test_a_malformed_run_is_refused(old: object, new: object) -> None:
    with pytest.raises(MALFORMED):
        decode_request(changed(RUN, old, new))


TOKENS = {"token_embedding": ArrayResult(np.ones((2, 1), np.float32))}


def with_results(outputs: object) -> bytes:
    """Return the message of an answer with these outputs, as they are on the wire."""
    message = msgspec.msgpack.decode(encode_answer(Answer(1, BatchResult([TOKENS], 0.0, 0.0))))
    assert message[2] == [{"token_embedding": {"array": ["f", [2, 1], ONES]}}]
    message[2] = outputs
    return msgspec.msgpack.encode(message)


ONES = np.ones(2, np.float32).tobytes()


def test_results_must_be_those_of_the_head() -> None:
    array = ["f", [2, 1], ONES]
    answer = decode_answer(with_results([{}, {"embedding": {"array": array}}]))
    assert [[*output] for output in answer.outcome.outputs] == [[], ["embedding"]]
    for outputs in (
        [{"embedding": {}}],
        [{"masked_lm": {"array": array}}],
        [{"embedding": array}],
        [[]],
        {},
        [{"embedding": {"array": ["O", [1], ONES]}}],
        [{"embedding": {"array": ["f", [3, 1], ONES]}}],
        [{"embedding": {"array": ["f", [2**62, 2**62], ONES]}}],
        [{"embedding": {"array": ["f", "no shape", ONES]}}],
        [{"embedding": {"array": ["f", [2, 1], "no bytes"]}}],
    ):
        with pytest.raises(MALFORMED):
            decode_answer(with_results(outputs))


def test_a_head_that_does_not_exist_and_a_message_of_many_levels_are_malformed() -> None:
    requests = msgspec.msgpack.decode(RUN)[-1][1]
    with pytest.raises(KeyError):
        decode_request(changed(RUN, requests, [{"no_head": {}}, {}]))
    with pytest.raises(MALFORMED):
        decode_request(changed(RUN, requests, [{"masked_lm": {"positions": "x"}}, {}]))
    with pytest.raises(RecursionError):
        deep = msgspec.Raw(b"\x91" * 100_000 + b"\x00")
        decode_request(changed(RUN, requests, [{"masked_lm": deep}, {}]))
    for message in (b"\x91" * 100_000, b"", b"\xc1", encode(Cancel(1))[:-1]):
        for decode in (decode_request, decode_answer):
            with pytest.raises(MALFORMED):
                decode(message)


class Recorder(frames.Channel):
    """Records what arrives; a message "raise" is not handled, "drop" ends the connection."""

    def __init__(self, max_unsent_bytes: int = 2**28) -> None:
        super().__init__("the peer")
        self._MAX_UNSENT_BYTES = max_unsent_bytes
        self.messages: list[bytes] = []
        self.ends = 0
        self.ended = asyncio.Event()
        self.arrived = asyncio.Event()

    def received(self, message: memoryview) -> None:
        if message == b"raise":
            raise KeyError("no such message")
        if message == b"drop":
            self.drop("asked to")
        self.messages.append(bytes(message))
        self.arrived.set()

    def lost(self) -> None:
        self.ends += 1
        self.ended.set()


async def connected(recorder: Recorder) -> socket.socket:
    """Return the other end of the recorder's connection."""
    ours, theirs = socket.socketpair()
    await asyncio.get_running_loop().create_connection(lambda: recorder, sock=ours)
    theirs.setblocking(False)
    return theirs


def framed(*messages: bytes) -> bytes:
    return b"".join(struct.pack("=I", len(message)) + message for message in messages)


async def fed(*pieces: bytes) -> tuple[list[bytes], bool]:
    """Return the messages that pieces of a stream give, and whether the connection was closed."""
    recorder = Recorder()
    with await connected(recorder):
        for piece in pieces:
            recorder.data_received(piece)
        return recorder.messages, recorder._transport.is_closing()


async def test_messages_arrive_in_any_pieces_up_to_the_longest_length() -> None:
    stream = framed(b"one", b"", b"seventeen", b"x")
    for size in (1, 3, 4, 5, 99):
        for end, last in ((len(stream), [b"x"]), (len(stream) - 1, [])):
            pieces = [stream[at : min(at + size, end)] for at in range(0, end, size)]
            assert await fed(*pieces) == ([b"one", b"", b"seventeen", *last], False)
    assert await fed(struct.pack("=I", 2**30)) == ([], False)
    assert await fed(struct.pack("=I", 2**30 + 1)) == ([], True)


async def test_a_message_that_is_not_handled_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await fed(framed(b"one", b"drop", b"three")) == ([b"one", b"drop"], True)
    assert await fed(framed(b"one", b"raise", b"three")) == ([b"one"], True)
    assert "the connection to the peer is closed: a malformed message (KeyError" in caplog.text


async def test_a_peer_that_leaves_too_much_unread_is_dropped() -> None:
    recorder = Recorder(max_unsent_bytes=1_000_000)
    with await connected(recorder) as theirs:
        recorder.send(bytes(10_000_000))
        assert not recorder._transport.is_closing()
        recorder.send(b"more")
        assert recorder._transport.is_closing()
        recorder.send(b"nothing happens")
        await recorder.ended.wait()
        assert theirs.recv(100)[:4] == struct.pack("=I", 10_000_000)
