"""Parts of requests of the Open Inference Protocol: tensors in JSON, and bytes after the JSON."""

import json
import struct
from typing import Any


def tensor(name: str, *texts: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)} | fields


def sized(name: str, size: Any, count: int, **fields: Any) -> dict[str, Any]:
    """Return a tensor whose texts come after the JSON."""
    parameters = {"binary_data_size": size}
    made = {"name": name, "shape": [count], "datatype": "BYTES", "parameters": parameters}
    return made | fields


def packed(*texts: bytes | str) -> bytes:
    """Return texts as they come after the JSON."""
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    return b"".join(struct.pack("<I", len(each)) + each for each in data)


def binary(
    tensors: list[dict[str, Any]], after: bytes, **fields: Any
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request with bytes after its JSON."""
    head = json.dumps({"inputs": tensors} | fields).encode()
    return head + after, {"inference-header-content-length": str(len(head))}
