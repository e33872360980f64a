"""Processes for tests: forks of the test process, small children, and bundles without weights."""

import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cloze.model_store import Store
from cloze.model_store.manifest import BundleSpec
from cloze.service.errors import StartupError
from cloze.service.observe.logs import WRITER
from tests.support import task_model as model
from tests.support.waiting import wait_until

CHILD = """
import json, os, signal, sys, time
child = json.loads(sys.argv[1])
name, folder = child["name"], os.path.dirname(child["engine_sockets"][0])
def note(event):
    with open(folder + "/events", "a") as events:
        events.write(f"{event} {name} {os.getpid()}\\n")
def end(*_):
    note("end")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
note("start")
with open(f"{folder}/config-{name}", "w") as config:
    json.dump(child | {"environment": dict(os.environ)}, config)
os.fstat(child["listener"])
if os.path.exists(f"{folder}/fail-{name}"):
    sys.exit(int(open(f"{folder}/fail-{name}").read()))
while os.path.exists(f"{folder}/wait-{name}"):
    time.sleep(0.01)
note("ready")
os.write(child["ready"], b"1")
while os.getppid() == child["parent"]:
    time.sleep(0.02)
"""
"""A child that notes what happens to it. Files of its folder say what it does: ``fail-NAME`` holds
the exit code of its start, and with ``wait-NAME`` it is not ready."""

_LONGEST_S = 60
"""A fork that lives for longer hangs; it writes where, and ends."""

COMMAND = (sys.executable, "-S", "-c", CHILD)


def publish(root: Path, name: str = "tiny") -> str:
    """Publish a bundle that has no weights; return its full name."""
    described = model.manifest(name=name)
    fields = {field: getattr(described, field) for field in BundleSpec.model_fields}
    store = Store(root)
    with store.staging() as folder:
        for file in described.files:
            (folder / file).write_text(name)
        model.CONTEXT.tokenizer._backend.save(str(folder / "tokenizer.json"))
        return store.publish(folder, BundleSpec(**fields)).manifest.reference


@dataclass(frozen=True)
class Fork:
    """A fork of the test process, and the file of what it writes and logs."""

    pid: int
    output: Path

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def code(self) -> int:
        """Return the exit code, when the process has ended."""
        ended: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                ended.append(os.waitstatus_to_exitcode(status))
            return bool(pid)

        wait_until(has_ended)
        return ended[0]

    @property
    def log(self) -> str:
        return self.output.read_text()


@contextmanager
def forked(run: Callable[[], int], output: Path) -> Iterator[Fork]:
    """Let a fork of this process run a function, whose value is its exit code; 2: no start."""
    output.touch()
    pid = os.fork()
    if pid == 0:
        _run(run, output)
    try:
        yield Fork(pid, output)
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _run(run: Callable[[], int], output: Path) -> None:
    code = 99
    try:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        WRITER.waiting.clear()  # the lines of services of earlier tests, which had no log
        faulthandler.dump_traceback_later(_LONGEST_S, exit=True, file=2)
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
        code = run()
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        logging.shutdown()
        os._exit(code)
