"""Put faults into a module, one at a time, and report those that its tests do not notice.

The command works in copies of the tree, one per process, in a temporary folder.
"""

import argparse
import compileall
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

from tests.mutants.owners import tests_of
from tests.mutants.sample import Equivalents, Mutant, modules, sample
from tests.support.sources import ROOT, file_of, python_path

SURVIVED, NOTICED, TIMEOUT = "SURVIVED", "noticed", "timeout"
"""How the tests of a mutant end. A timeout counts as noticed: the mutant makes a loop endless."""

_LOG = "tests.log"
_LONGEST_S = 600.0
"""Time for the tests without a mutant."""


def main() -> int:
    options = _options()
    mutants = sample(modules(options.target), options.size, options.seed, Equivalents())
    print(f"{len(mutants)} mutants of {options.target}, seed {options.seed}", flush=True)
    _load_libraries()
    counts = _run(mutants, options)
    killed, tested = counts[True], sum(counts.values())
    share = 100 * killed / max(tested, 1)
    print(f"{options.target}: {killed} of {tested} noticed ({share:.0f} %), seed {options.seed}")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("target", help="a package or module, for example service/tasks")
    parser.add_argument("--size", type=int, default=60, help="mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    parser.add_argument("--seconds", type=float, default=1200.0, help="default: 1200")
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    return parser.parse_args()


def _load_libraries() -> None:
    """Import the large libraries once; the processes of the mutants inherit them."""
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    import fastapi  # noqa: F401
    import httpx  # noqa: F401
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import pytest  # noqa: F401
    import torch  # noqa: F401
    import uvicorn  # noqa: F401
    from transformers import (  # noqa: F401
        BertForPreTraining,
        BertForSequenceClassification,
        DistilBertForMaskedLM,
    )


def _run(mutants: Sequence[Mutant], options: argparse.Namespace) -> Counter[bool]:
    """Test each mutant until the time is over; return how many were noticed, and how many not."""
    trees: Queue[Path] = Queue()
    noticed: Counter[bool] = Counter()
    with _copies(options.processes, trees), ThreadPoolExecutor(options.processes) as pool:
        limits_s = _limits_s({mutant.path for mutant in mutants}, trees)
        deadline = time.monotonic() + options.seconds

        def test(mutant: Mutant) -> None:
            if time.monotonic() > deadline:
                return
            tree = trees.get()
            try:
                begin = time.monotonic()
                end = _tested(mutant, tree, limits_s[mutant.path])
            finally:
                trees.put(tree)
            noticed[end != SURVIVED] += 1
            print(f"{end} {time.monotonic() - begin:.1f} s {mutant}", flush=True)

        for done in [pool.submit(test, mutant) for mutant in mutants]:
            done.result()
    return noticed


def _limits_s(paths: Iterable[str], trees: Queue[Path]) -> dict[str, float]:
    """Return how long the tests of each module may take with a mutant.

    The tests run without a mutant first: they must pass, so that a mutant is what they notice.
    """
    tree = trees.get()
    limits_s: dict[frozenset[str], float] = {}
    for path in paths:
        tests = tests_of(path)
        if not tests:
            raise SystemExit(f"no test belongs to {path}; see CONTRIBUTING.md")
        if (key := frozenset(tests)) not in limits_s:
            begin = time.monotonic()
            if _end(tests, tree, _LONGEST_S) != SURVIVED:
                print((tree / _LOG).read_text()[-2000:])
                raise SystemExit(f"tests fail without a mutant: {' '.join(tests)}")
            limits_s[key] = 20.0 + 4 * (time.monotonic() - begin)
    trees.put(tree)
    return {path: limits_s[frozenset(tests_of(path))] for path in paths}


@contextmanager
def _copies(number: int, trees: Queue[Path]) -> Iterator[None]:
    """Put copies of the tree's files into a queue; remove them at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for index in range(number):
            tree = Path(folder) / str(index)
            for name in filter(None, listed.stdout.split("\0")):
                if (ROOT / name).exists():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
            compileall.compile_dir(tree, quiet=1)
            trees.put(tree)
        yield


def _tested(mutant: Mutant, tree: Path, limit_s: float) -> str:
    """Put a mutant into a tree, run the tests of its module, and return how they end."""
    file = file_of(mutant.path, tree)
    original = file.read_text()
    _write(file, mutant.source)
    try:
        return _end(tests_of(mutant.path), tree, limit_s)
    finally:
        _write(file, original)


def _write(file: Path, source: str) -> None:
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _end(tests: Sequence[str], tree: Path, limit_s: float) -> str:
    """Run tests in a fork of this process, which has the large libraries loaded already."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_test_status(tests, tree))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return SURVIVED if os.waitstatus_to_exitcode(status) == 0 else NOTICED
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMEOUT


def _test_status(tests: Sequence[str], tree: Path) -> int:
    """Run tests in a tree, in this process; return pytest's exit status."""
    os.setsid()
    os.chdir(tree)
    log = os.open(tree / _LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": python_path(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[:1] = python_path(tree).split(os.pathsep)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "cloze")]:
        del sys.modules[name]
    import pytest

    loaded_before = "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main(["-x", "-p", "no:cacheprovider", "-W", loaded_before, *tests]))


if __name__ == "__main__":
    sys.exit(main())
