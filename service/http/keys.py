"""API keys: named, hashed in a file that is read again when it changes, with scopes and limits.

The file is TOML. Each table is a key:

    [search-team]
    sha256 = "9f86d081884c7d65..."        # of the key; `cloze keys add` prints both
    scopes = ["inference"]                # of inference, metrics, admin
    requests_per_minute = 600             # optional
    models = ["stars", "topics@2"]        # optional: the served models that the key may use

A file without keys is refused, as a damaged one is, since it may be half written. The line
`no_keys = true` says that nobody shall have a key.
"""

import hashlib
import hmac
import logging
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cloze.model_store.error_lines import received
from cloze.model_store.manifest import parse_reference
from cloze.service.core import Overloaded, Rejection, StartupError
from cloze.service.http.watched_files import WatchedFiles

log = logging.getLogger("cloze")

_MAX_FILE_BYTES = 1_000_000

_NO_KEYS = "no_keys"
"""Name of the file's value which says that the file is meant to have no keys."""

_BEARER = b"bearer "


class Permission(StrEnum):
    """What a key allows: a scope in the file of keys."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


def _model_name(name: str) -> str:
    parse_reference(name)
    return name


class KeyEntry(BaseModel):
    """A key as the file describes it.

    Attributes:
        models: NAME or NAME@VERSION of the models that exist for the key, adapters too; None: all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[list[Annotated[Permission, Field(strict=False)]], Field(min_length=1)]
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    models: (
        Annotated[list[Annotated[str, AfterValidator(_model_name)]], Field(min_length=1)] | None
    ) = None


class Key:
    """A key of the file, with the requests that it may still send."""

    def __init__(self, name: str, entry: KeyEntry) -> None:
        self.name, self.entry = name, entry
        self._allowed = float(entry.requests_per_minute or 0)
        self._counted: float | None = None

    def count(self, now: float) -> None:
        """Count a request at a `time.monotonic` time (token bucket of a minute's size).

        Raises:
            Overloaded: the key has sent too many requests.
        """
        most = self.entry.requests_per_minute
        if most is None:
            return
        seconds = 0.0 if self._counted is None else now - self._counted
        self._allowed = min(most, self._allowed + seconds * most / 60)
        self._counted = now
        if self._allowed < 1:
            wait_s = (1 - self._allowed) * 60 / most
            message = f"the key {self.name} may send {most} requests per minute"
            raise Overloaded(message, wait_s, Rejection.KEY_LIMIT)
        self._allowed -= 1


class Keys:
    """The keys of a file.

    Attributes:
        file: reads the keys again; the old keys stay if the file cannot be read or is malformed.

    Raises:
        StartupError: the file cannot be read, or is malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: list[Key] = []
        self.file = WatchedFiles([path], self._read, "keys")
        self.file.read()

    def find(self, authorization: bytes) -> Key | None:
        """Return the key of an ``Authorization`` header; None if there is no such key.

        All hashes are compared, in constant time each, so that the time says nothing of the keys.
        """
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        digest = hashlib.sha256(authorization[len(_BEARER) :].strip()).hexdigest()
        same = [key for key in self._keys if hmac.compare_digest(key.entry.sha256, digest)]
        return same[-1] if same else None

    def _read(self) -> None:
        """Read the file; a key whose entry has not changed keeps its count of requests."""
        keys = _read(self._path)
        old = {key.name: key for key in self._keys}
        self._keys = [
            old[key.name] if key.name in old and old[key.name].entry == key.entry else key
            for key in keys
        ]


def _read(path: Path) -> list[Key]:
    """Return the keys of a file, or raise `StartupError`."""
    try:
        with path.open() as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise StartupError(f"the keys file {path} has more than {_MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(text)
        has_none = tables.get(_NO_KEYS) is True
        if has_none:
            del tables[_NO_KEYS]
        keys = [Key(name, KeyEntry.model_validate(table)) for name, table in tables.items()]
    except OSError as error:
        raise StartupError(f"the keys file {path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "a key"
        problem = first["msg"].lower().removeprefix("value error, ")
        problem += received(first, first["input"])
        raise StartupError(f"the keys file {path}: {place}: {problem}") from None
    except (ValueError, RecursionError) as error:  # of tomllib, and of bytes that are not UTF-8
        raise StartupError(f"the keys file {path} is no TOML: {error}") from None
    if keys and has_none:
        raise StartupError(f"the keys file {path} has keys, and the line `{_NO_KEYS} = true` too")
    if not (keys or has_none):
        raise StartupError(
            f"the keys file {path} has no key; make one with `cloze keys add`, "
            f"or write the line `{_NO_KEYS} = true` if that is meant"
        )
    return keys
