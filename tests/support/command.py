"""Runs commands: the command line in a process of its own or in this one, and others."""

import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner, Result

from tests.support.serving import bare_environment


def call(
    *words: object, check: bool = True, timeout: float = 600, **options: Any
) -> "subprocess.CompletedProcess[str]":
    """Run a command; fail with its output if it fails."""
    command = [str(word) for word in words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout, **options
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done


def cloze(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run ``cloze`` with these arguments and variables, and with none of the test's own."""
    env = bare_environment(COLUMNS="120") | environment
    return call(sys.executable, "-m", "cloze", *arguments, check=False, timeout=120, env=env)


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
