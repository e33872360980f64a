"""Plays the histories of many seeds, and prints the shortest history of each that fails.

Usage: python -m tests.support.world [--seeds 1-200] [--trace SEED]
"""

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from tests.support.world.history import History, drawn, play, shortest, worlds

LONGEST_SEARCH_S = 60.0
"""Time in which a shorter history is searched, per failing seed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a promise was broken in a history."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.world")
    parser.add_argument("--seeds", default="1-200", help="FROM-TO, or a number: from 1 on")
    parser.add_argument("--trace", type=int, metavar="SEED", help="print what happens in a history")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.trace is not None:
        world = play(drawn(options.trace))
        print(world.history, *world.trace, *world.failures, sep="\n")
        return bool(world.failures)
    first, _, last = options.seeds.rpartition("-")
    failed, played, simulated_s, took_s, began = [], 0, 0.0, 0.0, time.process_time()
    seeds = range(int(first or 1), int(last) + 1)
    for world in worlds(seeds):
        seed = world.history.seed
        played, simulated_s = played + 1, simulated_s + world.lasted_s
        took_s = time.process_time() - began
        if world.failures:
            failed.append(seed)
            print(f"{describe(world.history)}\n", flush=True)
    print(
        f"{played} histories of {simulated_s:.0f} s in {took_s:.0f} s of processor time, "
        f"{simulated_s / took_s:.0f} times as fast as the clock; failed: {failed or 'none'}"
    )
    return bool(failed)


def describe(history: History) -> str:
    """Return what failed in a history, and the shortest history that shows it."""
    until = time.monotonic() + LONGEST_SEARCH_S

    def fails(smaller: History) -> bool:
        return time.monotonic() < until and bool(play(smaller).failures)

    least = shortest(history, fails)
    failures = "\n".join(play(least).failures)
    return f"{failures}\nin the shortest history of {least}"


if __name__ == "__main__":
    sys.exit(main())
