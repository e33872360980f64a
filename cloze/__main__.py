"""Runs the command line: ``python -m cloze``."""

from cloze.entry import main

main()
