"""The entry point of ``cloze``: ``cloze ask`` starts without what the other commands import.

Most of the time of a short question is that of imports: 0.4 s of all, 0.2 s of what asking needs.
"""

import gc
import sys

import click

from cloze.options import CONTEXT


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["ask"]:
        from cloze.ask import ask

        click.Group("cloze", {"ask": ask}, context_settings=CONTEXT).main(prog_name="cloze")
    else:
        gc.disable()  # what imports make stays; a hundred collections would take 20 ms
        from cloze.cli import main as run

        gc.enable()
        run()
