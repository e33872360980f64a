"""Writes and reads JSON objects whose last field is the digest of their other fields."""

import hashlib
import json

Body = dict[str, object]
"""The fields of a JSON object."""


def seal(body: Body) -> bytes:
    """Return an object as JSON; the last field, ``digest``, is the sha256 of the other fields."""
    return _dump(body | {"digest": _digest(body)})


def parse_sealed(data: bytes) -> Body:
    """Return the fields of an object from the bytes that `seal` returned, without checking them.

    Raises:
        ValueError: the bytes are not a JSON object.
    """
    try:
        body = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("a manifest is a JSON object")
    return body


def unseal(body: Body, data: bytes) -> Body:
    """Return the fields without the digest, after a check of the digest.

    Raises:
        ValueError: the bytes are not those that `seal` returned for these fields.
    """
    content = {name: value for name, value in body.items() if name != "digest"}
    try:
        is_sealed = data == seal(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not is_sealed:
        raise ValueError("it was changed after it was published (its digest does not match)")
    return content


def _dump(body: Body) -> bytes:
    return json.dumps(body, indent=2, ensure_ascii=False).encode() + b"\n"


def _digest(body: Body) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
