"""Messages between front ends and engine processes: a message, or the one documented error."""

import tracemalloc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from cloze.model_store.batch import Encoding
from cloze.model_store.heads import HEADS, Pooling
from cloze.service import errors
from cloze.service.batching import fair_queue
from cloze.service.core import BatchResult
from cloze.service.errors import ServiceError
from cloze.service.processes import frames
from cloze.service.processes.frames import MALFORMED, Answer, Cancel, Greeting
from tests.fuzz.damage import damaged_bytes, damaged_json
from tests.fuzz.search import Target

MAX_BYTES_PER_BYTE = 200
"""Most memory per byte of a message; the dictionary of a result takes 72."""

FIXED_BYTES = 2**16
"""Memory of an error with its traceback."""

Message = frames.Run | Cancel | Greeting | Answer

numbers = st.integers(0, 2**31 - 1)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
seconds = st.floats(allow_nan=False)

REQUEST_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "positions": st.lists(numbers, min_size=1, max_size=3),
    "top_k": numbers,
    "targets": st.lists(numbers, max_size=3),
    "tokens": numbers,
    "keys": numbers,
    "first": numbers,
    "vectors": st.lists(
        st.dictionaries(st.integers(0, 12), st.floats(-2, 2), min_size=1), min_size=1, max_size=2
    ),
    "pooling": st.sampled_from(Pooling),
}
head_requests = st.fixed_dictionaries(
    {},
    optional={
        name: st.builds(
            head.request, **{each.name: REQUEST_FIELDS[each.name] for each in fields(head.request)}
        )
        for name, head in HEADS.items()
    },
)


@st.composite
def encodings(draw: st.DrawFn) -> list[Encoding]:
    """Draw the encodings of one request; some share their requests to heads."""
    asked = draw(st.lists(head_requests, min_size=1, max_size=2))
    return [
        Encoding(
            draw(arrays.arrays(np.int32, length)),
            draw(arrays.arrays(np.int32, length)),
            draw(st.sampled_from(asked)),
        )
        for length in draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    ]


@st.composite
def results(draw: st.DrawFn) -> BatchResult:
    """Draw the results of one request, each with the results of one or two heads."""
    outputs = []
    for _ in range(draw(st.integers(1, 3))):
        heads = draw(st.sets(st.sampled_from(list(HEADS)), min_size=1, max_size=2))
        outputs.append({name: draw(head_results(name)) for name in heads})
    return BatchResult(outputs, draw(seconds), draw(seconds))


def head_results(head: str) -> st.SearchStrategy[Any]:
    """Return results of a head, with arrays of up to two dimensions."""
    shapes = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)
    columns = {
        each.name: arrays.arrays(np.int64 if "ids" in each.name else np.float32, shapes)
        for each in fields(HEADS[head].result)
    }
    return st.builds(HEADS[head].result, **columns)


kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
failures = st.builds(errors.Overloaded, names, numbers) | st.builds(
    lambda kind, message: kind(message),
    st.sampled_from(
        [
            each
            for each in kinds
            if issubclass(each, ServiceError) and not issubclass(each, errors.Overloaded)
        ]
    ),
    names,
)
terms = st.builds(
    fair_queue.Terms, seconds, names, st.none() | seconds, names, st.booleans(), st.booleans()
)
runs = st.builds(frames.Run, numbers, numbers, terms, encodings())
waits = st.builds(fair_queue.ExpectedWait, seconds, seconds, numbers, numbers)
done = st.builds(Answer, numbers, results(), waits)
failed = st.builds(Answer, numbers, failures, waits)
greetings = st.builds(Greeting, st.dictionaries(names, names, max_size=3))
messages: st.SearchStrategy[Message] = runs | done | failed | greetings | st.builds(Cancel, numbers)


def encode(message: Message) -> bytes:
    """Return the bytes of any message."""
    if isinstance(message, frames.Run):
        return frames.encode_run(message)
    if isinstance(message, Answer):
        return frames.encode_answer(message)
    return frames.encode(message)


def decode(data: bytes) -> Message:
    """Return the message of either direction.

    Raises:
        `frames.MALFORMED`: the bytes are no message of either direction.
    """
    try:
        return frames.decode_request(data)
    except MALFORMED:
        return frames.decode_answer(data)


@st.composite
def damaged_parts(draw: st.DrawFn) -> bytes:
    """Draw a message of the right kind, with one or two parts removed, changed or repeated."""
    data = encode(draw(runs | done | runs | done | failed | greetings))
    kind, *parts = msgspec.msgpack.decode(data)
    for _ in range(draw(st.integers(1, 2))):
        parts = draw(damaged_json(parts))
    rest = parts if isinstance(parts, list) else [parts]
    try:
        return msgspec.msgpack.encode([kind, *rest])
    except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError):  # no MessagePack has these
        return data


def check(data: bytes, _: Path) -> bool:
    """Decode a message; return whether the bytes are a message of either direction."""
    is_accepted = False
    decoders: list[Callable[[bytes], Message]] = [frames.decode_request, frames.decode_answer]
    for decoder in decoders:
        tracemalloc.start()
        try:
            message = decoder(data)
        except MALFORMED:
            continue
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            limit = MAX_BYTES_PER_BYTE * len(data) + FIXED_BYTES
            assert peak <= limit, f"{len(data)} bytes needed {peak} bytes of memory"
        written = encode(message)
        assert encode(decode(written)) == written, "the message cannot be sent again"
        is_accepted = True
    return is_accepted


TARGET = Target(
    name="frames",
    valid=[
        encode(Cancel(1)),
        encode(Greeting({"bert@1": "fp32"})),
        encode(Answer(1, errors.EngineFailed("it failed"))),
    ],
    inputs=damaged_parts() | damaged_bytes(messages.map(encode)) | st.binary(max_size=100),
    check=check,
    examples=300,
)
