"""The types of numbers: against torch's conversions, and the integers by hand."""

import numpy as np
import pytest
import torch

from cloze.service.protocols.vector_numbers import INTEGERS, NumbersBody

TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", TORCH)
def test_the_bytes_are_those_of_torch(dtype: str) -> None:
    """For all bfloat16 up to 400, of both signs, which include all ties between 8-bit numbers."""
    exact = np.arange(0x43C9, dtype=np.uint32) << 16
    random = np.random.default_rng(1).normal(size=3000).astype(np.float32)
    values = np.concatenate([exact.view(np.float32), random])
    values = np.stack([values, -values])
    converted = torch.from_numpy(values).to(TORCH[dtype])
    size = converted.element_size()
    expected = converted.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).numpy()
    for endianness, order in (("native", "<"), ("little", "<"), ("big", ">")):
        body = NumbersBody.model_validate({"embed_dtype": dtype, "endianness": endianness})
        written = np.frombuffer(body.written(values), f"{order}u{size}")
        assert (written == expected.view(f"u{size}").ravel()).all()


def test_larger_numbers_become_the_largest() -> None:
    for dtype, largest in (("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        body = NumbersBody.model_validate({"embed_dtype": dtype})
        data = body.written(np.array([1e9, -1e9], np.float32))
        numbers = torch.frombuffer(bytearray(data), dtype=TORCH[dtype]).float()
        assert numbers.tolist() == [largest, -largest]


def test_integers_have_a_scale_per_vector() -> None:
    vectors = np.array([[0.6, -0.3, 0.0], [0.0, 0.0, 0.0], [-2.0, 1.0, 2.0]], np.float32)
    expected = [[127, -64, 0], [0, 0, 0], [-127, 64, 127]]
    assert INTEGERS["int8"](vectors).tolist() == expected
    unsigned = INTEGERS["uint8"](vectors)
    assert unsigned.dtype == np.uint8
    assert unsigned.tolist() == [[number + 128 for number in row] for row in expected]
