"""What `make mutants` puts into a module; which tests belong to a module."""

import tomllib
from pathlib import Path

import pytest

from tests.mutants import owners
from tests.support.sources import file_of, name_of

MEASURED = [
    f"service/{name}" for name in ["batching", "engine", "http", "processes", "protocols", "tasks"]
]
MEASURED += [f"export/{name}" for name in ("blocks", "graph", "heads", "load", "measure", "train")]
MEASURED += ["export/check/rounding.py", "export/check/verify.py"]
MEASURED += ["model_store", "cloze/bulk", "client"]
"""The packages and modules of which samples were taken."""


@pytest.mark.parametrize("target", MEASURED)
def test_each_module_has_tests_that_exist(target: str) -> None:
    path = file_of(target)
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    for file in files:
        tests = owners.tests_of(name_of(file))
        assert tests, f"no test belongs to {file}: see CONTRIBUTING.md"
        assert [test for test in tests if not _exists(test)] == []


def _exists(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    path = owners.ROOT / file
    return path.is_file() and f"def {name}(" in path.read_text() if name else path.is_file()


def test_each_folder_of_unit_tests_is_named_as_a_package() -> None:
    unit = owners.ROOT / "tests/unit"
    folders = {file.parent.relative_to(unit) for file in unit.rglob("test_*.py")}
    assert [str(folder) for folder in folders if not file_of(str(folder)).is_dir()] == []


def test_a_mutant_without_equal_has_a_reason() -> None:
    """An entry whose line is no longer in its module is to be removed."""
    tables = tomllib.loads((Path(owners.__file__).parent / "equivalent.toml").read_text())
    for entry in tables["rule"] + tables.get("mutant", []):
        assert entry["reason"]
    for entry in tables.get("mutant", []):
        lines = " ".join(file_of(entry["path"]).read_text().split())
        assert " ".join(entry["before"].split()) in lines, entry
