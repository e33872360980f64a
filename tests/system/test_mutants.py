"""What `make mutants` puts into a module; which tests belong to a module."""

import tomllib
from pathlib import Path

import pytest

from tests.mutants import owners

MEASURED = (
    "service/batching",
    "service/engine",
    "service/http",
    "service/processes",
    "service/protocols",
    "service/tasks",
    "model_store",
    "export/blocks",
    "export/graph",
    "export/heads",
    "export/measure",
    "export/check/rounding.py",
    "export/check/verify.py",
    "cloze/bulk",
    "cloze/client",
)
"""The packages and modules of bench/results/mutants.md."""


@pytest.mark.parametrize("target", MEASURED)
def test_each_module_has_tests_that_exist(target: str) -> None:
    path = owners.ROOT / target
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    for file in files:
        tests = owners.tests_of(str(file.relative_to(owners.ROOT)))
        assert tests, f"no test belongs to {file}: see docs/mutation-testing.md"
        assert [test for test in tests if not _exists(test)] == []


def _exists(test: str) -> bool:
    file, _, name = test.partition("[")[0].partition("::")
    path = owners.ROOT / file
    return path.is_file() and f"def {name}(" in path.read_text() if name else path.is_file()


def test_each_row_is_a_package_or_a_module() -> None:
    assert [name for name in owners.table() if not (owners.ROOT / name).exists()] == []


def test_each_folder_of_unit_tests_is_named_as_a_package() -> None:
    unit = owners.ROOT / "tests/unit"
    folders = {file.parent.relative_to(unit) for file in unit.rglob("test_*.py")}
    assert [str(folder) for folder in folders if not (owners.ROOT / folder).is_dir()] == []


def test_the_tests_of_a_module_come_before_those_of_its_package() -> None:
    tests = owners.tests_of("service/tasks/qa.py")
    assert tests[0] == "tests/unit/service/tasks/test_qa.py"
    assert "tests/unit/service/tasks/test_embed.py" in tests


def test_a_mutant_without_equal_has_a_reason() -> None:
    """An entry whose line is no longer in its module is to be removed."""
    tables = tomllib.loads((Path(owners.__file__).parent / "equivalent.toml").read_text())
    for entry in tables["rule"] + tables.get("mutant", []):
        assert entry["reason"]
    for entry in tables.get("mutant", []):
        lines = " ".join((owners.ROOT / entry["path"]).read_text().split())
        assert " ".join(entry["before"].split()) in lines, entry


SOURCE = """
def f(xs, most=3):
    if most > 3 and xs or None:
        xs.append(min(most, 4))
    return any(x for x in reversed(xs) if x == "word") if xs else True
"""
EXPECTED = {
    "def f(xs, most= 4):",
    "if most >= 3 and xs or None:",
    "if xs or None:",
    "if most > 3 or None:",
    "if False:",
    "if True:",
    "pass",
    "xs.append((most))",
    "xs.append((4))",
    "xs.append(max(most, 4))",
    'return all(x for x in reversed(xs) if x == "word") if xs else True',
    'return any(x for x in (xs) if x == "word") if xs else True',
    'return any(x for x in reversed(xs) if x == "wordx") if xs else True',
    'return any(x for x in reversed(xs) if x != "word") if xs else True',
    "return any(x for x in reversed(xs) if True) if xs else True",
    'return any(x for x in reversed(xs) if x == "word") if False else True',
    'return any(x for x in reversed(xs) if x == "word") if xs else False',
}


def test_the_operators_make_the_faults_that_people_make(tmp_path: Path) -> None:
    pytest.importorskip("cosmic_ray", reason="`make mutants` installs cosmic-ray")
    from tests.mutants.sample import Equivalents, sample

    (tmp_path / "module.py").write_text(SOURCE)
    path = str(tmp_path / "module.py")
    made = [
        mutant.after for seed in range(40) for mutant in sample([path], 100, seed, Equivalents())
    ]
    assert set(made) >= EXPECTED
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
