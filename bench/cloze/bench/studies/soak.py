"""A soak: mixed traffic for a long time, faults on a schedule, and checks of what they left.

    python bench/studies/soak.py OUT [--minutes 30] [--frontends 2 | --frontends 0 --reload]

Starts a server of the bundled models on loopback. An open loop sends 60 % of what a closed loop
measured: four tasks, short and long texts, bad requests, and clients that leave. In the middle
third of the time, the faults of `bench.soak.faults` come in turn. A server of one process
(``--frontends 0``) gets none, or reloads (``--reload``).

Writes OUT/soak.json, OUT/soak.md, OUT/soak.png and OUT/server.log. The exit code is 1 if a check of
`bench.soak.verdict` fails.
"""

import argparse
import sys
import time
from pathlib import Path

from cloze.bench.errors import BenchError
from cloze.bench.load import allow_many_connections
from cloze.bench.soak.faults import KINDS
from cloze.bench.soak.report import as_markdown
from cloze.bench.soak.run import SoakPlan, soak


def main() -> int:
    """Run a soak, print its tables, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="receives the results")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.6, help="of the capacity")
    parser.add_argument("--rate", type=float, default=0.0, help="requests per second instead")
    parser.add_argument("--fault-every", type=float, default=45.0, help="seconds")
    parser.add_argument("--reload", action="store_true", help="send SIGHUP to one process")
    options = parser.parse_args()
    names = [name for name in KINDS if name != "reload"] if options.frontends else []
    if options.reload:
        if options.frontends:
            parser.error("a server with front ends does not reload: add --frontends 0")
        names.append("reload")
    plan = SoakPlan(
        seconds=options.minutes * 60,
        frontends=options.frontends,
        share=options.share,
        rate=options.rate,
        faults=tuple(KINDS[name] for name in names),
        fault_every_s=options.fault_every,
    )
    allow_many_connections()
    started = time.monotonic()
    try:
        observed, results = soak(plan, options.folder)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 1
    print(as_markdown(observed, results))
    print(f"{time.monotonic() - started:.0f} s; results are in {options.folder}")
    return 0 if all(check.passed for check in results) else 1


if __name__ == "__main__":
    sys.exit(main())
