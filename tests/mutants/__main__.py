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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tests.mutants.owners import tests_of
from tests.mutants.sample import ROOT, Equivalents, Mutant, modules, sample

_PASSED, _NO_TESTS = 0, 5


@dataclass(frozen=True)
class Options:
    """What `make mutants` takes.

    per_mutant_s: time in which the tests of a module must notice a mutant or pass.
    seconds: time of the whole run; the mutants that are left then are not counted.
    """

    target: str
    size: int
    seed: int
    per_mutant_s: float
    seconds: float
    processes: int
    only: str


def main() -> int:
    options = _options()
    paths = [path for path in modules(options.target) if tests_of(path)]
    mutants = sample(paths, options.size, options.seed, Equivalents())
    mutants = [mutant for mutant in mutants if options.only in mutant.path]
    print(f"{len(mutants)} mutants of {options.target}, seed {options.seed}", flush=True)
    _load_libraries()
    survivors, counts = _run(mutants, options)
    for package in sorted({mutant.split(":")[0] for mutant in counts}):
        print(package, counts[f"{package}:killed"], "of", _total(counts, package))
    killed = sum(n for name, n in counts.items() if name.endswith(":killed"))
    tested = sum(counts.values())
    print(f"{options.target}: {killed} of {tested} killed ({100 * killed / max(tested, 1):.0f} %)")
    return 0


def _total(counts: Counter[str], name: str) -> int:
    return sum(counts[f"{name}:{end}"] for end in ("killed", "survived"))


def _options() -> Options:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("target", help="a package or module, for example service/tasks")
    parser.add_argument("--size", type=int, default=60, help="mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    parser.add_argument("--per-mutant-s", type=float, default=120.0)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="", help="run the mutants of paths that contain this")
    return Options(**vars(parser.parse_args()))


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


def _run(mutants: Sequence[Mutant], options: Options) -> tuple[list[Mutant], Counter[str]]:
    """Test each mutant; return the survivors and the counts by module and end."""
    deadline = time.monotonic() + options.seconds
    trees: Queue[Path] = Queue()
    survivors: list[Mutant] = []
    counts: Counter[str] = Counter()

    def test(mutant: Mutant) -> None:
        if time.monotonic() > deadline:
            return
        tree = trees.get()
        begin = time.monotonic()
        survived = _passes(mutant, tree, options.per_mutant_s)
        trees.put(tree)
        counts[f"{mutant.path}:{'survived' if survived else 'killed'}"] += 1
        if survived:
            survivors.append(mutant)
        took = time.monotonic() - begin
        print(f"{'SURVIVED' if survived else 'killed'} {took:.1f} s {mutant}", flush=True)

    with _copies(options.processes, trees), ThreadPoolExecutor(options.processes) as pool:
        for path in sorted({mutant.path for mutant in mutants}):
            original = Mutant(path, 0, "", "", (ROOT / path).read_text())
            tree = trees.get()
            if not _passes(original, tree, 10 * options.per_mutant_s):
                print((tree / "tests.log").read_text()[-2000:])
                raise SystemExit(f"the tests of {path} fail without a mutant: {tests_of(path)}")
            trees.put(tree)
        list(pool.map(test, mutants))
    return survivors, counts


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


def _passes(mutant: Mutant, tree: Path, limit_s: float) -> bool:
    """Return whether the tests of the module pass with the mutant in place."""
    file = tree / mutant.path
    original = file.read_text()
    _write(file, mutant.source)
    try:
        return _ends_well(tests_of(mutant.path), tree, limit_s)
    finally:
        _write(file, original)


def _write(file: Path, source: str) -> None:
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _ends_well(tests: Sequence[str], tree: Path, limit_s: float) -> bool:
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
            return os.waitstatus_to_exitcode(status) == _PASSED
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _test_status(tests: Sequence[str], tree: Path) -> int:
    """Run tests in a tree, in this process; return pytest's exit status."""
    os.setsid()
    os.chdir(tree)
    log = os.open(tree / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.path[0] = str(tree)
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "cloze")]:
        del sys.modules[name]
    import pytest

    loaded_before = "ignore::pytest.PytestAssertRewriteWarning"
    return int(pytest.main(["-x", "-p", "no:cacheprovider", "-W", loaded_before, *tests]))


if __name__ == "__main__":
    sys.exit(main())
