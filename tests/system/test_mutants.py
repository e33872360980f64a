"""What `make mutants` puts into a module; which tests belong to a module."""

import tomllib
from pathlib import Path

import pytest

from tests.mutants import owners
from tests.support.sources import file_of, name_of

MEASURED = [
    f"service/{name}" for name in ["batching", "engine", "http", "processes", "protocols", "tasks"]
]
MEASURED += [f"export/{name}" for name in ("blocks", "graph", "heads", "measure")]
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


SOURCE = """
def f(xs, most=3):
    if most > 3 and xs or None:
        xs.append(min(most, 4))
    return any(x for x in reversed(xs) if x == "word") if xs else True
"""
EXPECTED = """
def f(xs, most= 4):
if most >= 3 and xs or None:
if xs or None:
if False:
pass
xs.append((most))
xs.append(max(most, 4))
return all(x for x in reversed(xs) if x == "word") if xs else True
return any(x for x in (xs) if x == "word") if xs else True
return any(x for x in reversed(xs) if x == "wordx") if xs else True
return any(x for x in reversed(xs) if True) if xs else True
"""


def test_the_operators_make_the_faults_that_people_make(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="`make mutants` installs cosmic-ray")
    from tests.mutants.sample import Equivalents, sample

    (tmp_path / "module.py").write_text(SOURCE)
    path = str(tmp_path / "module.py")
    made = [
        mutant.after for seed in range(40) for mutant in sample([path], 100, seed, Equivalents())
    ]
    assert set(made) >= set(EXPECTED.strip().splitlines())
    for one in (1, 2):
        assert sample([path], 5, one, Equivalents()) == sample([path], 5, one, Equivalents())


@pytest.mark.parametrize(
    ("handler", "changed"),
    [
        ("OSError", ["X"]),
        ("(OSError) as error", ["(X) as error"]),
        ("csv.Error", ["csv.X"]),
        ("(KeyError, csv.Error)", ["(X, csv.Error)", "(KeyError, csv.X)"]),
    ],
)
def test_exceptions_of_handlers_are_replaced(handler: str, changed: list[str]) -> None:
    mutating = pytest.importorskip("cosmic_ray.mutating", reason="make mutants installs it")
    from tests.mutants.operators import ReplaceException

    code = "try:\n    pass\nexcept {}:\n    pass\n"
    for number, expected in enumerate([*changed, None]):
        mutant = mutating.mutate_code(code.format(handler), ReplaceException(), number)
        name = "CosmicRayTestingException"
        assert mutant == (expected and code.format(expected.replace("X", name)))
