"""Which tests belong to a module: those of its folder in `tests/unit`, and `owners.toml`."""

import sys
import tomllib
from pathlib import Path

from tests.support.sources import ROOT

TABLE = Path(__file__).with_name("owners.toml")


def table() -> dict[str, list[str]]:
    """Return the further tests of modules and packages, in the order in which to run them."""
    return tomllib.loads(TABLE.read_text())


def tests_of(module: str) -> list[str]:
    """Return the test files of a module, the nearest first.

    The tests in ``tests/unit/PACKAGE`` belong to the modules of the package, those in
    ``test_MODULE.py`` above all to one of them. The table names tests of modules and of packages.
    """
    path = Path(module)
    folder = ROOT / "tests/unit" / path.parent
    own = folder / f"test_{path.stem.strip('_')}.py"
    files = sorted(folder.glob("test_*.py"), key=lambda file: (file != own, file.name))
    names = [str(file.relative_to(ROOT)) for file in files]
    rows = table()
    for name in (module, *map(str, path.parents)):
        names += [f"tests/{file}" for file in rows.get(name, ())]
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    print(" ".join(tests_of(sys.argv[1])))
