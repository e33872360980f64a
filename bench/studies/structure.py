"""Measures the structure of the source code of a checkout.

    python bench/studies/structure.py [CHECKOUT]

The study prints, as a Markdown table:

- functions over 40 lines, and functions with more than six parameters;
- lines over 100 and over 130 columns;
- the median and the largest module, in lines.

A function has the lines from ``def`` to its end, and the parameters that a caller passes, so
neither ``self`` nor ``cls``. Figures of tests are in a column of their own.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINES, MAX_PARAMETERS = 40, 6
COLUMNS = (100, 130)


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


def report(checkout: Path) -> None:
    """Print the figures of a git checkout, then the names behind them."""
    modules = read_modules(checkout)
    project = [module for module in modules if module.path.parts[0] != "tests"]
    tests = [module for module in modules if module.path.parts[0] == "tests"]
    print("| | project | tests |\n|---|---|---|")
    of_tests = figures(tests)
    for name, value in figures(project).items():
        print(f"| {name} | {value} | {of_tests[name]} |")
    for title, chosen in (("Long functions", _long(project)), ("Parameters", _wide(project))):
        print(f"\n{title}:\n")
        for function in sorted(chosen, key=lambda function: function.place):
            size = f"{function.lines} lines, {function.parameters} parameters"
            print(f"- {function.place} {function.name}: {size}")


if __name__ == "__main__":
    report(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2]).resolve())
