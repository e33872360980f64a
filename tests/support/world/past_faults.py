"""Puts faults of the past back into the service, and plays histories until a promise breaks.

Usage: python -m tests.support.world.past_faults [--only WORDS] [--seeds 1-2000]

Each fault runs in a process of its own, whose import of the service replaces text of its modules.
The history that is printed keeps the promises without the fault.
"""

import argparse
import importlib.machinery
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from tests.support.sources import ROOT

SERVICE = ROOT / "service/cloze/service"
_MODULE = "tests.support.world.past_faults"
_TABLE = Path(__file__).with_suffix(".toml")


class Change(NamedTuple):
    """A replacement of text that a file has once."""

    file: str
    old: str
    new: str

    def apply(self, source: str) -> str:
        """Return a source with the change."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file} has {source.count(self.old)} times: {self.old}")
        return source.replace(self.old, self.new)


class PastFault(NamedTuple):
    """A fault and the commit that mended it."""

    name: str
    commit: str
    changes: tuple[Change, ...]


def past_faults() -> list[PastFault]:
    """Return the faults of the table."""
    rows: list[dict[str, Any]] = tomllib.loads(_TABLE.read_text())["fault"]
    return [
        PastFault(row["name"], row["commit"], tuple(Change(**one) for one in row["change"]))
        for row in rows
    ]


def changed_sources(fault: PastFault) -> dict[str, str]:
    """Return the sources of the modules with a fault, by their files."""
    sources: dict[str, str] = {}
    for change in fault.changes:
        path = SERVICE / change.file
        sources[str(path)] = change.apply(sources.get(str(path)) or path.read_text())
    return sources


def put_back(fault: PastFault) -> None:
    """Let later imports of the service have a fault."""
    sources = changed_sources(fault)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if (source := sources.pop(self.path, None)) is None:
            return get_code(self, name)
        return compile(source, self.path, "exec")

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign]


def first_failure(seeds: range) -> dict[str, Any]:
    """Return the seed of the first history that fails, what it shows, and the processor time."""
    import logging

    from tests.support.world.history import worlds

    logging.disable(logging.CRITICAL)
    for seed, world in zip(seeds, worlds(seeds), strict=True):
        if world.failures:
            return {"seed": seed, "shows": world.failures[0], "seconds": time.process_time()}
    return {"seed": None, "shows": "NOT FOUND", "seconds": time.process_time()}


def find(fault: PastFault, seeds: range) -> dict[str, Any]:
    """Return the first failure by a fault: the history keeps the promises without the fault."""
    seconds, end = 0.0, seeds.stop
    while True:
        command = [sys.executable, "-m", _MODULE, "--seeds", f"{seeds.start}-{end - 1}"]
        command += ["--with", fault.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        found: dict[str, Any] = json.loads(done.stdout)
        found["seconds"] = seconds = seconds + found["seconds"]
        if (
            found["seed"] is None
            or first_failure(range(found["seed"], found["seed"] + 1))["seed"] is None
        ):
            return found
        print(f"seed {found['seed']} fails without the fault too: {found['shows']}", flush=True)
        seeds = range(found["seed"] + 1, end)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return how many faults were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.world.past_faults")
    parser.add_argument("--seeds", default="1-2000", help="FROM-TO (1-2000)")
    parser.add_argument("--only", default="", help="faults whose name has this")
    parser.add_argument("--with", dest="fault", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    seeds, faults = range(int(first), int(last) + 1), past_faults()
    if options.fault is not None:  # in a process of its own
        put_back(next(fault for fault in faults if fault.name == options.fault))
        print(json.dumps(first_failure(seeds)))
        return 0
    missed = 0
    for fault in faults:
        if options.only in fault.name:
            found = find(fault, seeds)
            missed += found["seed"] is None
            which = f"seed {found['seed']}, {found['seconds']:.0f} s: {found['shows']}"
            print(f"{fault.name} ({fault.commit}): {which}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
