"""The entry point of ``cloze``: ``cloze ask`` starts without what the other commands import.

Most of the time of a short question is that of imports: 0.4 s of all, 0.2 s of what asking needs.
"""

import sys

import click

from cloze.options import CONTEXT


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["ask"]:
        from cloze.ask import ask

        click.Group("cloze", {"ask": ask}, context_settings=CONTEXT).main(prog_name="cloze")
    else:
        from cloze.cli import main as run

        run()
