"""Targets of the fuzz tests, one module per target, and the inputs to replay.

A target reads bytes that something else wrote: the author of a bundle, another process, a client.
Each folder here has the name of a target, and holds inputs that failed once or that are hard to
read. `tests/export/test_fuzz.py` replays these inputs and generates others. An input that must be refused
has the ending ``.refused``, one that must be accepted ``.accepted``. A long search keeps an input
that fails without an ending; give the file a name and an ending when you fix the fault.
"""
