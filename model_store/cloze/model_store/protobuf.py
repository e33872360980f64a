"""Reads messages in the wire format of protocol buffers, by a table of the fields to expect.

The service must not import onnx, and onnxruntime does not list the nodes of a graph. The reader is
strict, so that no other reader of the same bytes sees another message: a field outside the table,
a second value of a single field and a group are errors.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

_MAX_VARINT_BYTES = 10


class Wire(IntEnum):
    """The wire type of a field: how the field's bytes are delimited."""

    INTEGER = 0
    FIXED64 = 1
    BYTES = 2
    """A string, a message, or packed numbers."""

    FIXED32 = 5


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message.

    Attributes:
        name: the field's name, or for a refused field, what the field holds.
        repeated: whether the field may have several values. Repeated numbers may be packed.
    """

    name: str
    wire: Wire = Wire.BYTES
    repeated: bool = False
    refused: bool = False


Value = int | memoryview


class Message:
    """The fields of one message.

    Args:
        fields: the fields to expect, by number.

    Raises:
        ValueError: the bytes are not such a message.
    """

    __slots__ = ("_kind", "_values")

    def __init__(self, kind: str, data: memoryview, fields: Mapping[int, Field]) -> None:
        self._kind = kind
        self._values: dict[str, list[Value]] = {}
        for number, wire, value in _split(data):
            field = fields.get(number)
            if field is None:
                raise ValueError(f"the {kind} has the unknown field {number}")
            if field.refused:
                raise ValueError(f"the {kind} has {field.name}, which no bundle may have")
            self._add(field, wire, value)

    def _add(self, field: Field, wire: int, value: Value) -> None:
        values = self._values.setdefault(field.name, [])
        is_packed = field.repeated and wire == Wire.BYTES and field.wire is Wire.INTEGER
        if isinstance(value, memoryview) and is_packed:
            values.extend(_integers(value))
        elif wire != field.wire:
            raise ValueError(f"the field {field.name} of the {self._kind} has wire type {wire}")
        elif values and not field.repeated:
            raise ValueError(f"the {self._kind} has two values of {field.name}")
        else:
            values.append(value)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def integers(self, name: str) -> list[int]:
        """Return the values of an int64 field."""
        return [
            value - 2**64 if value >= 2**63 else value
            for value in self._values.get(name, ())
            if isinstance(value, int)
        ]

    def integer(self, name: str) -> int:
        """Return the value of an int64 field, or 0."""
        return next(iter(self.integers(name)), 0)

    def parts(self, name: str) -> list[memoryview]:
        """Return the values of a field of bytes or messages."""
        return [value for value in self._values.get(name, ()) if isinstance(value, memoryview)]

    def text(self, name: str) -> str:
        """Return the value of a string field, or ""."""
        return bytes(next(iter(self.parts(name)), b"")).decode()


def _split(data: memoryview) -> Iterator[tuple[int, int, Value]]:
    """Yield the number, the wire type and the value of each field."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire = tag >> 3, tag & 7
        if wire == Wire.INTEGER:
            integer, position = _varint(data, position)
            yield number, wire, integer
            continue
        if wire == Wire.BYTES:
            size, position = _varint(data, position)
        elif wire in (Wire.FIXED64, Wire.FIXED32):
            size = 8 if wire == Wire.FIXED64 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {wire}")
        end = position + size
        if end > len(data):
            raise ValueError("a field is longer than its message")
        yield number, wire, data[position:end]
        position = end


def _integers(packed: memoryview) -> Iterator[int]:
    position = 0
    while position < len(packed):
        value, position = _varint(packed, position)
        yield value


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after the integer."""
    if position < len(data) and data[position] < 0x80:
        return data[position], position + 1
    value = 0
    for index, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if value >= 2**64:
                break
            return value, position + index + 1
    raise ValueError("an integer does not end within 10 bytes")
