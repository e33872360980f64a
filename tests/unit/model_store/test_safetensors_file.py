"""The reader of safetensors beside the library that writes them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save

from cloze.model_store.safetensors_file import parse_safetensors


def test_tensors_of_every_type_are_read() -> None:
    wanted = torch.tensor([[1.5, -2.0, 0.25], [3.0, 0.0, -1e-3]])
    types = {"a": torch.float32, "b": torch.float16, "c": torch.bfloat16}
    tensors = {name: wanted.to(dtype) for name, dtype in types.items()}
    data = save({**tensors, "empty": torch.zeros(0, 4)}, {"format": "pt"})
    read, metadata = parse_safetensors(data)
    assert metadata == {"format": "pt"}
    assert read.pop("empty").shape == (0, 4)
    for name, tensor in tensors.items():
        assert np.array_equal(read[name], tensor.float().numpy())


def header(*places: object, data: bytes = bytes(8), **others: object) -> bytes:
    written = json.dumps({f"t{n}": place for n, place in enumerate(places)} | others).encode()
    return len(written).to_bytes(8, "little") + written + data


def place(shape: object = (2,), offsets: object = (0, 8), dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "its header does not fit"),
        ((2**62).to_bytes(8, "little") + b"{}", "its header does not fit"),
        ((2**22 + 1).to_bytes(8, "little") + bytes(2**22 + 1), "its header does not fit"),
        (header(data=b"")[:-1] + b"[", "JSONDecodeError"),
        (header([1]), "TypeError in header"),
        (header(place(dtype="I64")), "allowed are F32, F16, BF16"),
        (header(place(shape=[3])), "but its shape is"),
        (header(place(shape=[-2])), "a malformed shape"),
        (header(place(offsets=[0, 8]), place(offsets=[0, 8])), "bytes of no tensor, or of two"),
        (header(place(), data=bytes(9)), "bytes of no tensor, or of two"),
        (header(place(offsets=[8, 16])), "but its shape is"),
        (header(place(), data=np.float32([1, np.inf]).tobytes()), "not finite"),
    ],
)
def test_a_malformed_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_safetensors(data)
