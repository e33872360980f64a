"""Runs the command line: ``python -m cloze``."""

from cloze.cli import main

main()
