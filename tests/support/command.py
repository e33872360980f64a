"""Runs the command line in a process of its own."""

import subprocess
import sys

from tests.support.serving import bare_environment


def cloze(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``cloze`` with these arguments and variables, and with none of the test's own."""
    return subprocess.run(
        [sys.executable, "-m", "cloze", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=bare_environment(COLUMNS="120") | environment,
    )
