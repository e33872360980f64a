"""Measures the structure of the source code of a checkout.

    python bench/studies/structure.py [CHECKOUT]

The study prints, as a Markdown table:

- the files of the project that one request to ``/embed`` enters, on the default embedding model;
- functions over 40 lines, and functions with more than six parameters;
- lines over 100 and over 130 columns;
- the median and the largest module, in lines.

A function has the lines from ``def`` to its end, and the parameters that a caller passes, so
neither ``self`` nor ``cls``. Figures of tests are in a column of their own.
"""

import ast
import asyncio
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from starlette.types import ASGIApp

MAX_LINES, MAX_PARAMETERS = 40, 6
COLUMNS = (100, 130)
_MODEL = "cloze-bert"
_TRACE = "--trace"


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method.

    Attributes:
        place: file and line.
        name: of the function.
        lines: from ``def`` to the end.
        parameters: without ``self`` and ``cls``.
    """

    place: str
    name: str
    lines: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file: its path in the checkout, its text, and its functions."""

    path: Path
    text: str
    functions: list[Function]

    @property
    def lines(self) -> list[str]:
        """The lines without their ends."""
        return self.text.splitlines()


def read_modules(checkout: Path) -> list[Module]:
    """Read the Python files that git tracks or does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    modules = []
    for name in sorted(set(listed.stdout.split())):
        if (checkout / name).is_file():  # git still lists a file that was removed
            text = (checkout / name).read_text()
            modules.append(Module(Path(name), text, list(_functions(name, text))))
    return modules


def _functions(path: str, text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            place = f"{path}:{node.lineno}"
            yield Function(place, node.name, lines, len(_parameters(node.args)))


def _parameters(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    names = [argument.arg for argument in (*named, *variadic)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


@contextmanager
def recorded_files(checkout: Path) -> Iterator[Callable[[], set[Path]]]:
    """Record the project's files whose functions are called, on this and on new threads.

    Yields:
        A function that starts to record anew, and returns the set that receives the files.
    """
    entered: set[Path] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            file = Path(os.path.realpath(frame.f_code.co_filename))  # cloze/service is a link
            if file.is_relative_to(checkout):
                entered.add(file.relative_to(checkout))

    def restart() -> set[Path]:
        entered.clear()
        return entered

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield restart
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def files_of_request(
    make_app: Callable[[], Any], request: Callable[[ASGIApp], Any], checkout: Path
) -> list[Path]:
    """Return the files that one request enters after a warm-up request.

    Args:
        make_app: builds the application, whose threads start here.
        request: sends one request to the application.
        checkout: root of the project; files of the benchmark and of other projects do not count.
    """
    project = {module.path for module in read_modules(checkout) if module.path.parts[0] != "bench"}
    with recorded_files(checkout) as restart:
        app = make_app()
        async with app.router.lifespan_context(app):
            await request(app)
            entered = restart()
            await request(app)
            return sorted(entered & project)


def trace(checkout: Path) -> list[Path]:
    """Trace a request through the service that this process imports."""
    from cloze.bench.request_cost import request
    from cloze.service.app import single_process
    from cloze.service.settings import Settings

    def make_app() -> ASGIApp:
        return single_process(Settings(model=(_MODEL,))).api()

    return asyncio.run(files_of_request(make_app, request, checkout))


def trace_in_checkout(checkout: Path) -> list[str]:
    """Trace a request in a process that imports the packages of the checkout."""
    done = subprocess.run(
        [sys.executable, __file__, _TRACE, str(checkout)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.split()


def _long(modules: Iterable[Module]) -> list[Function]:
    return [f for module in modules for f in module.functions if f.lines > MAX_LINES]


def _wide(modules: Iterable[Module]) -> list[Function]:
    return [f for module in modules for f in module.functions if f.parameters > MAX_PARAMETERS]


def figures(modules: list[Module]) -> dict[str, str]:
    """Return the figures of a group of modules."""
    lines = [line for module in modules for line in module.lines]
    sizes = sorted((len(module.lines), str(module.path)) for module in modules)
    largest, path = sizes[-1]
    rows = {
        "modules, lines": f"{len(modules)}, {len(lines):,}",
        f"functions over {MAX_LINES} lines": str(len(_long(modules))),
        f"functions with more than {MAX_PARAMETERS} parameters": str(len(_wide(modules))),
    }
    for columns in COLUMNS:
        over = sum(len(line) > columns for line in lines)
        rows[f"lines over {columns} columns"] = str(over)
    rows["median module, lines"] = f"{statistics.median(size for size, _ in sizes):g}"
    rows["largest module, lines"] = f"{largest} ({path})"
    return rows


def report(checkout: Path, files: list[str] | None = None) -> None:
    """Print the figures, then the names behind them.

    Args:
        checkout: root of a git checkout.
        files: that a request enters; None: trace a request.
    """
    modules = read_modules(checkout)
    project = [module for module in modules if module.path.parts[0] != "tests"]
    tests = [module for module in modules if module.path.parts[0] == "tests"]
    files = trace_in_checkout(checkout) if files is None else files
    print("| | project | tests |\n|---|---|---|")
    print(f"| files that one request to /embed enters | {len(files)} | |")
    of_tests = figures(tests)
    for name, value in figures(project).items():
        print(f"| {name} | {value} | {of_tests[name]} |")
    print(f"\nFiles of the request: {', '.join(files)}")
    for title, chosen in (("Long functions", _long(project)), ("Parameters", _wide(project))):
        print(f"\n{title}:\n")
        for function in sorted(chosen, key=lambda function: function.place):
            size = f"{function.lines} lines, {function.parameters} parameters"
            print(f"- {function.place} {function.name}: {size}")


def main(arguments: list[str]) -> None:
    """Print the report, or only the traced files for `trace_in_checkout`."""
    if arguments[:1] == [_TRACE]:
        print("\n".join(map(str, trace(Path(arguments[1])))))
    else:
        here = Path(__file__).resolve().parents[2]
        report(Path(arguments[0]).resolve() if arguments else here)


if __name__ == "__main__":
    main(sys.argv[1:])
