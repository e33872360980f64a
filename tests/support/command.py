"""Runs the command line, in a process of its own or in this one."""

import os
import subprocess
import sys

from click.testing import CliRunner, Result

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


def cloze_here(*arguments: str, **environment: str) -> Result:
    """Run ``cloze`` in this process, without other variables of its own."""
    from cloze.cli import cli

    variables: dict[str, str | None] = {
        name: None for name in os.environ if name.startswith("CLOZE_")
    }
    runner = CliRunner(env=variables | {"COLUMNS": "120"} | environment)
    done = runner.invoke(cli, arguments, prog_name="cloze")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done
