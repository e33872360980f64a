"""Compressed bodies cost a time that is linear in their bytes, and have limits."""

import gzip
import tracemalloc

import pytest

from cloze.service.errors import RequestTooLarge
from cloze.service.http.gunzip import MAX_MEMBERS, gunzip
from tests.support.refusals import refused

MB = 2**20
EMPTY = gzip.compress(b"")


def named(name: bytes) -> bytes:
    """An empty member with a file name."""
    return EMPTY[:3] + b"\x08" + EMPTY[4:10] + name + b"\0" + EMPTY[10:]


def extra(count: int) -> bytes:
    """Empty members with the largest extra field."""
    return (EMPTY[:3] + b"\x04" + EMPTY[4:10] + b"\xff\xff" + bytes(65_535) + EMPTY[10:]) * count


def stored(blocks: int) -> bytes:
    """A member of empty blocks."""
    return EMPTY[:10] + b"\0\0\0\xff\xff" * blocks + EMPTY[10:]


@pytest.mark.parametrize(
    ("data", "content"),
    [
        (b"", b""),
        (EMPTY, b""),
        (gzip.compress(bytes(3 * MB + 1)), bytes(3 * MB + 1)),
        (gzip.compress(b"a", 0) + gzip.compress(b"b", 9) + EMPTY + gzip.compress(b"c"), b"abc"),
        (gzip.compress(b"a") * MAX_MEMBERS, b"a" * MAX_MEMBERS),
        (named(b"n" * MB), b""),
        (extra(20), b""),
        (stored(MB), b""),
    ],
    # Names of the cases, since a member's bytes hold the time at which it was made.
    ids=["nothing", "empty", "one", "four", "most", "named", "extra", "stored"],
)
def test_the_content_is_that_of_all_members(data: bytes, content: bytes) -> None:
    assert gunzip(data, 2**30) == content


@pytest.mark.parametrize("cut", [1, 4, 8, 9, 12, 20, 29])
def test_cut_data_is_an_error(cut: int) -> None:
    data = gzip.compress(b"abc" * 1000) + gzip.compress(b"d")
    if cut != len(gzip.compress(b"d")):  # else it ends with the first member
        with refused("malformed_body"):
            gunzip(data[:-cut], 2**30)


@pytest.mark.parametrize("member", [EMPTY, gzip.compress(b"a")], ids=["empty", "one byte"])
def test_members_are_limited(member: bytes) -> None:
    with refused("body_too_large", MAX_MEMBERS):
        gunzip(member * (8 * MB // len(member)), 2**30)
    with pytest.raises(RequestTooLarge):
        gunzip(member * (MAX_MEMBERS + 1), 2**30)


@pytest.mark.parametrize("size", [0, 1, 262_144, 262_145, 3 * MB])
def test_the_content_has_a_limit(size: int) -> None:
    data = gzip.compress(bytes(size)) + gzip.compress(b"1")
    assert len(gunzip(data, size + 1)) == size + 1
    with refused("body_too_large", size):
        gunzip(data, size)


def test_a_bomb_ends_at_the_limit() -> None:
    """A gigabyte of zeros: the process holds little more than the limit at any time."""
    data = gzip.compress(bytes(MB)) * MAX_MEMBERS
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLarge):
            gunzip(data, MB)
        assert tracemalloc.get_traced_memory()[1] < 8 * MB
    finally:
        tracemalloc.stop()
