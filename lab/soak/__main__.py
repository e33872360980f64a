"""A soak: mixed traffic for a long time, faults on a schedule, and checks of what they left.

    python -m lab.soak OUT [--minutes 30] [--frontends 2]

Starts a server of the bundled models on loopback. An open loop sends 60 % of what a closed loop
measured: four tasks, short and long texts, bad requests, and clients that leave. In the middle
third of the time, the faults of `lab.soak.processes` come in turn. A server of one process
(``--frontends 0``) reloads instead.

Writes OUT/soak.json, OUT/soak.md and OUT/server.log. The exit code is 1 if a check of
`lab.soak.verdict` fails.
"""

import sys
from pathlib import Path

import click

from cloze.bench.errors import BenchError
from lab.soak.processes import KINDS
from lab.soak.run import SoakPlan, soak
from lab.soak.verdict import as_markdown


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--minutes", default=30.0)
@click.option("--frontends", default=2, help="0: one process.")
@click.option("--rate", default=0.0, help="Requests per second; 0: 60 % of the capacity.")
def main(folder: Path, minutes: float, frontends: int, rate: float) -> None:
    """Run a soak, write its results into FOLDER, and print its tables."""
    kinds = tuple(kind for kind in KINDS.values() if kind.replaces == bool(frontends))
    plan = SoakPlan(seconds=minutes * 60, frontends=frontends, rate=rate, faults=kinds)
    try:
        observed, results = soak(plan, folder)
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    click.echo(as_markdown(observed, results))
    sys.exit(not all(check.passed for check in results))


if __name__ == "__main__":
    main()
