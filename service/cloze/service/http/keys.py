"""API keys: named, hashed in a file that is read again when it changes, with scopes and limits.

The file is TOML. Each table is a key:

    [search-team]
    sha256 = "9f86d081884c7d65..."        # of the key; `cloze keys add` prints both
    scopes = ["inference"]                # of inference, metrics, admin
    requests_per_minute = 600             # optional
    tokens_per_minute = 100000            # optional
    expires = 2027-01-31T12:00:00Z        # optional
    models = ["stars", "topics@2"]        # optional: the served models that the key may use

While a key is replaced, ``sha256`` is a list: the hashes of the old key and of the new one.

A file without keys is refused, as a damaged one is, since it may be half written. The line
`no_keys = true` says that nobody shall have a key.
"""

import hashlib
import hmac
import logging
import tomllib
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cloze.model_store.error_lines import received
from cloze.model_store.manifest import parse_reference
from cloze.service import errors
from cloze.service.clock import CLOCK, Clock
from cloze.service.http.watched_files import WatchedFiles

log = logging.getLogger("cloze")

_MAX_FILE_BYTES = 1_000_000

_BEARER = b"bearer "


class Permission(StrEnum):
    """What a key allows: a scope in the file of keys."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


def _model_name(name: str) -> str:
    parse_reference(name)
    return name


def _moment(value: Any) -> datetime:
    """Return a time of TOML, or a string with one; UTC if it names no other zone."""
    moment = datetime.fromisoformat(str(value))
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class KeyEntry(BaseModel):
    """A key as the file describes it.

    Attributes:
        sha256: the hashes of the keys of this name, each of which is valid.
        expires: the time from which on the keys are refused; of a date, its first moment in UTC.
        models: NAME or NAME@VERSION of the models that exist for the key, adapters too; None: all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sha256: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(min_length=1),
    ]
    scopes: Annotated[list[Annotated[Permission, Field(strict=False)]], Field(min_length=1)]
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    expires: Annotated[datetime, BeforeValidator(_moment)] | None = None
    models: (
        Annotated[list[Annotated[str, AfterValidator(_model_name)]], Field(min_length=1)] | None
    ) = None


class Bucket:
    """What a key may still send: a token bucket of a minute's size, full at first.

    All times are of `Clock.monotonic`. For example, a bucket of 600 per minute gets 10 per second.
    When a request takes 2000 of 600, 1400 are owed, and 1 is left after 140.1 s.
    """

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._filled: float | None = None

    def wait_s(self, now: float) -> float:
        """Return the seconds until at least 1 is left; 0 if it is now."""
        return max(0.0, (1 - self._fill(now)) * 60 / self.per_minute)

    def take(self, number: int, now: float) -> None:
        """Take more than is left, or less; a negative number gives back."""
        self._left = self._fill(now) - number

    def _fill(self, now: float) -> float:
        seconds = 0.0 if self._filled is None else now - self._filled
        self._left = min(self.per_minute, self._left + seconds * self.per_minute / 60)
        self._filled = now
        return self._left


class Key:
    """The keys of one name, with what they may still send together.

    Args:
        entry: the table of the file.
        before: the key of this name in the file before; a limit that stays keeps its count.
    """

    def __init__(self, name: str, entry: KeyEntry, before: "Key | None" = None) -> None:
        self.name, self.entry = name, entry
        limits = {"requests": entry.requests_per_minute, "tokens": entry.tokens_per_minute}
        self._buckets = {unit: Bucket(most) for unit, most in limits.items() if most is not None}
        for unit, bucket in (before._buckets if before else {}).items():
            if limits[unit] == bucket.per_minute:
                self._buckets[unit] = bucket

    def expires_before(self, moment: float) -> bool:
        """Return whether the key is expired at a time, in seconds since 1970."""
        return self.entry.expires is not None and self.entry.expires.timestamp() <= moment

    def count(self, now: float) -> None:
        """Count a request at a `Clock.monotonic` time; its tokens are taken by `take_tokens`.

        Raises:
            Overloaded: the key has sent too many requests or tokens.
        """
        if not self._buckets:
            return
        wait_s, unit = max((bucket.wait_s(now), unit) for unit, bucket in self._buckets.items())
        if wait_s:
            most = self._buckets[unit].per_minute
            message = f"the key {self.name} may send {most} {unit} per minute"
            raise errors.RateLimited(message, wait_s, errors.Rejection.KEY_LIMIT)
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1, now)

    def take_tokens(self, tokens: int, now: float) -> None:
        """Take the tokens of a request that is tokenized; a negative number gives them back."""
        if (bucket := self._buckets.get("tokens")) is not None:
            bucket.take(tokens, now)


class Keys:
    """The keys of a file.

    Attributes:
        file: reads the keys again; the old keys stay if the file cannot be read or is malformed.

    Raises:
        StartupError: the file cannot be read, or is malformed.
    """

    def __init__(self, path: Path, clock: Clock = CLOCK) -> None:
        self._path, self._clock = path, clock
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
        hashes = ((key, sha256) for key in self._keys for sha256 in key.entry.sha256)
        same = [key for key, sha256 in hashes if hmac.compare_digest(sha256, digest)]
        return same[-1] if same else None

    def _read(self) -> None:
        """Read the file, and warn of keys that expire soon."""
        before = {key.name: key for key in self._keys}
        entries = read_entries(self._path)
        self._keys = [Key(name, entry, before.get(name)) for name, entry in entries.items()]
        soon = self._clock.wall() + 14 * 86_400
        expiring = [
            f"{key.name} ({key.entry.expires})" for key in self._keys if key.expires_before(soon)
        ]
        if expiring:
            log.warning("keys that expire within 14 days: %s", ", ".join(expiring))


def read_entries(path: Path) -> dict[str, KeyEntry]:
    """Return the keys of a file by name, or raise `StartupError`."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise errors.StartupError(f"the keys file {path} has more than {_MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(text)
        has_none = tables.get("no_keys") is True
        if has_none:
            del tables["no_keys"]
        keys = {name: KeyEntry.model_validate(table) for name, table in tables.items()}
    except OSError as error:
        raise errors.StartupError(
            f"the keys file {path} cannot be read: {error.strerror}"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "a key"
        problem = first["msg"].lower().removeprefix("value error, ")
        problem += received(first, first["input"])
        raise errors.StartupError(f"the keys file {path}: {place}: {problem}") from None
    except (ValueError, RecursionError) as error:  # of tomllib, and of bytes that are not UTF-8
        raise errors.StartupError(f"the keys file {path} is no TOML: {error}") from None
    if keys and has_none:
        raise errors.StartupError(
            f"the keys file {path} has keys, and the line `no_keys = true` too"
        )
    if not (keys or has_none):
        raise errors.StartupError(
            f"the keys file {path} has no key; make one with `cloze keys add`, "
            "or write the line `no_keys = true` if that is meant"
        )
    return keys
