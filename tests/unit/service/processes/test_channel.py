"""Messages over a real Unix socket: whole, in pieces, too long, and to a peer that is gone."""

import asyncio
import logging
import socket
import struct

import pytest

from cloze.service.processes import channel
from cloze.service.processes.channel import Channel


class Recorder(Channel):
    """Records what arrives; a message "raise" is not handled, "drop" ends the connection."""

    def __init__(self, max_unsent_bytes: int = channel.MAX_UNSENT_BYTES) -> None:
        super().__init__("the peer", max_unsent_bytes)
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


def fed(*pieces: bytes) -> tuple[list[bytes], bool]:
    """Return the messages that pieces of a stream give, and whether the connection was closed."""

    async def run() -> tuple[list[bytes], bool]:
        recorder = Recorder()
        with await connected(recorder):
            for piece in pieces:
                recorder.data_received(piece)
            return recorder.messages, recorder._transport.is_closing()

    return asyncio.run(run())


def test_several_messages_in_one_piece() -> None:
    assert fed(framed(b"one", b"", b"three")) == ([b"one", b"", b"three"], False)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_messages_in_small_pieces(size: int) -> None:
    stream = framed(b"one", b"", b"seventeen", b"x")
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert fed(*pieces) == ([b"one", b"", b"seventeen", b"x"], False)


def test_the_end_of_one_message_and_the_beginning_of_the_next() -> None:
    stream = framed(b"one", b"two", b"three")
    assert fed(stream[:5], stream[5:12], stream[12:]) == ([b"one", b"two", b"three"], False)


def test_a_message_is_as_long_as_its_length_says() -> None:
    assert fed(framed(b"one")[:-1]) == ([], False)


def test_the_longest_length_is_accepted_and_a_longer_one_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert channel.MAX_MESSAGE_BYTES == 2**30
    assert fed(struct.pack("=I", 2**30)) == ([], False)
    assert fed(struct.pack("=I", 2**30 + 1)) == ([], True)
    assert "1073741825 bytes, more than the limit of 1073741824" in caplog.text


def test_a_message_that_is_not_handled_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert fed(framed(b"one", b"raise", b"three")) == ([b"one"], True)
    assert "the connection to the peer is closed: a malformed message (KeyError" in caplog.text


def test_nothing_is_handled_after_a_drop() -> None:
    assert fed(framed(b"one", b"drop", b"three")) == ([b"one", b"drop"], True)


def test_the_end_is_reported_once_and_a_partial_message_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run(last: bytes) -> Recorder:
        recorder = Recorder()
        with await connected(recorder) as theirs:
            theirs.send(last)
        await recorder.ended.wait()
        return recorder

    recorder = asyncio.run(run(framed(b"one")))
    assert (recorder.messages, recorder.ends, caplog.text) == ([b"one"], 1, "")
    assert asyncio.run(run(framed(b"one")[:-1])).ends == 1
    assert caplog.record_tuples == [
        ("cloze", logging.WARNING, "the peer disconnected in the middle of a message")
    ]


def test_a_sent_message_arrives_with_its_length() -> None:
    async def run() -> bytes:
        recorder = Recorder()
        with await connected(recorder) as theirs:
            recorder.send(b"one")
            recorder.send(b"")
            recorder.close()
            await recorder.ended.wait()
            return theirs.recv(100)

    assert asyncio.run(run()) == framed(b"one", b"")


def test_a_peer_that_leaves_too_much_unread_is_dropped() -> None:
    async def run() -> tuple[list[bool], bytes]:
        recorder = Recorder(max_unsent_bytes=1_000_000)
        closing = []
        with await connected(recorder) as theirs:
            recorder.send(bytes(10_000_000))
            closing.append(recorder._transport.is_closing())
            recorder.send(b"more")
            closing.append(recorder._transport.is_closing())
            recorder.send(b"nothing happens")
            await recorder.ended.wait()
            return closing, theirs.recv(100)[:4]

    closing, beginning = asyncio.run(run())
    assert closing == [False, True]
    assert beginning == struct.pack("=I", 10_000_000)


def test_what_is_unsent_up_to_the_limit_is_allowed() -> None:
    async def run() -> bool:
        recorder = Recorder(max_unsent_bytes=1)
        with await connected(recorder):
            recorder.send(b"small")
            recorder.send(b"small too")  # the socket took the first at once
            return recorder._transport.is_closing()

    assert asyncio.run(run()) is False
