"""Large JSON bodies: their limits, and their errors."""

import time

import orjson
import pytest

from cloze.service.http.body import BodyLimits, load
from tests.support.refusals import refused

NO_LIMITS = BodyLimits(10**9, 10**9, 10**9)


def test_no_number_takes_the_parser_long() -> None:
    """A number is parsed in one call, which keeps the interpreter; 8 MB take 0.03 s."""
    begun = time.thread_time()
    value = load(b"[0." + b"1" * 8_000_000 + b"]", NO_LIMITS)
    assert value == [pytest.approx(1 / 9)]
    with refused("malformed_body"):
        load(b"[" + b"1" * 8_000_000 + b"]", NO_LIMITS)
    assert time.thread_time() - begun < 1.0


def test_the_limit_of_values_admits_every_token_of_a_request() -> None:
    limits = BodyLimits.of_requests(8_000_000, 2048, 1_048_576)
    ids = [[1] * 512] * 2048
    assert load(orjson.dumps({"inputs": ids}), limits) == {"inputs": ids}
    with refused("body_too_large", 1081344):
        load(orjson.dumps([1] * 1_090_000), limits)
