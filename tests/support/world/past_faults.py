"""Puts faults of the past back into the service, and plays histories until a promise breaks.

Usage: python -m tests.support.world.past_faults [--only WORD] [--histories 2000] [--seeds-from 1]

Each fault runs in a process of its own, whose import of the service replaces text of its modules.
"""

import argparse
import importlib.machinery
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


def put_back(fault: PastFault) -> None:
    """Let later imports of the service have a fault."""
    sources: dict[str, str] = {}
    for change in fault.changes:
        path = SERVICE / change.file
        sources[str(path)] = change.apply(sources.get(str(path)) or path.read_text())
    get_code = importlib.machinery.SourceFileLoader.get_code

    def changed(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if (source := sources.pop(self.path, None)) is None:
            return get_code(self, name)
        return compile(source, self.path, "exec")

    importlib.machinery.SourceFileLoader.get_code = changed  # type: ignore[method-assign]


def find(fault: PastFault, seeds: range) -> str:
    """Return what the first history that fails shows, with its seed and the time."""
    put_back(fault)
    import gc
    import logging

    from tests.support.world.history import drawn, play

    logging.disable(logging.CRITICAL)
    gc.freeze()
    began = time.process_time()
    for seed in seeds:
        if seed % 10 == 0:
            gc.collect()
        if failures := play(drawn(seed)).failures:
            took_s = time.process_time() - began
            return f"seed {seed}, {seed - seeds.start + 1} histories, {took_s:.0f} s: {failures[0]}"
    return f"NOT FOUND in {len(seeds)} histories, {time.process_time() - began:.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return how many faults were not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.world.past_faults")
    parser.add_argument("--only", default="", help="faults whose name has this")
    parser.add_argument("--histories", type=int, default=2000, help="most per fault (2000)")
    parser.add_argument("--seeds-from", type=int, default=1, help="first seed (1)")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in past_faults() if options.only in fault.name]
    seeds = range(options.seeds_from, options.seeds_from + options.histories)
    if len(chosen) == 1:
        found = find(chosen[0], seeds)
        print(f"{chosen[0].name} ({chosen[0].commit}): {found}", flush=True)
        return int(found.startswith("NOT FOUND"))
    command = [sys.executable, "-m", __spec__.name, "--histories", str(options.histories)]
    command += ["--seeds-from", str(options.seeds_from), "--only"]
    return sum(subprocess.run([*command, fault.name], check=False).returncode for fault in chosen)


if __name__ == "__main__":
    sys.exit(main())
