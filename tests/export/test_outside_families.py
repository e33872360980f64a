"""A family of another package: the one of docs/models.md is exported, and served without it."""

import json
import os
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import httpx
import pytest

from cloze.export.families import BUILT_IN, GROUP, with_installed
from cloze.export.publish import export
from cloze.model_store import Store
from tests.support import tiny
from tests.support.command import call
from tests.support.serving import running_server

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package of the documentation, as an installer leaves it."""
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    example = re.search(r"\n    # pyproject.toml.*?\n\n(?=\S)", page, re.DOTALL)
    declared, _, module = dedent(example[0]).partition("# toy_family.py")
    folder = tmp_path_factory.mktemp("site")
    (folder / "toy_family.py").write_text("#" + module)
    (folder / "broken_family.py").write_text("raise RuntimeError('needs\\na licence')")
    points = re.findall(r'^(\w+) = "(.*)"$', declared, re.MULTILINE)
    assert points == [("toy", "toy_family:FAMILY")]
    points += [("broken", "broken_family:FAMILY"), ("bert", "toy_family:FAMILY")]
    info = folder / "toy_family-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 1.0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points)]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run_python(site: Path, *arguments: str) -> tuple[int, str]:
    """Run Python in a process of its own; return its code, and all that it printed."""
    path = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = call(
        sys.executable,
        *arguments,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path), "COLUMNS": "400"},
        cwd=ROOT,
    )
    return run.returncode, run.stdout + run.stderr


def test_a_family_of_a_package_is_exported_and_served_without_the_package(
    site: Path, tmp_path: Path
) -> None:
    checkpoint, store = tiny.save_checkpoint(tmp_path / "toy", "bert"), tmp_path / "store"
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "toy"}))
    command = f"-m cloze export {checkpoint} --name toy --model-store {store}"
    code, output = run_python(site, *command.split())
    assert code == 0, output
    for line in (
        "the family broken of toy-family is left out: it cannot be loaded: needs",
        "the family bert of toy-family is left out: toy_family:FAMILY is not a Family of this name",
    ):
        assert line in output
    assert "a licence" not in output
    export(str(tiny.save_checkpoint(tmp_path / "bert", "bert")), "bert", Store(store))
    with running_server(store) as server:
        answers = [
            httpx.post(
                f"{server.url}/fill-mask", json={"inputs": "the [MASK] was red", "model": name}
            ).json()
            for name in ("toy", "bert")
        ]
    assert answers[0] == answers[1] != []
    assert Store(store).manifest("toy").architecture.family == "toy"


@pytest.mark.slow
def test_a_family_whose_package_is_imported_first_is_found(site: Path) -> None:
    """The package imports the registry before its own family exists."""
    shown = "print('toy' in FAMILIES, *FAMILIES.problems, sep=chr(10))"
    code, output = run_python(
        site, "-c", f"import toy_family; from cloze.export.families import FAMILIES; {shown}"
    )
    assert code == 0, output
    is_found, *left_out = output.splitlines()
    assert is_found == "True"
    assert [line.partition(" is left out")[0] for line in left_out] == [
        "the family broken of toy-family",
        "the family bert of toy-family",
    ]


def test_names_that_are_taken_and_objects_that_are_no_family_are_left_out(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    values = [
        *[("toy", "toy_family:FAMILY")] * 2,
        ("bert", "cloze.export.families.bert:FAMILY"),
        ("other", "toy_family:read_config"),
        ("absent", "toy_family:NOTHING"),
        ("nowhere", "no_such_package:FAMILY"),
    ]
    points = [EntryPoint(name, value, GROUP) for name, value in values]
    families, problems = with_installed(BUILT_IN, points)
    assert families.keys() - BUILT_IN.keys() == {"toy"}
    assert families["bert"] is BUILT_IN["bert"]
    assert [problem.partition(" is left out: ")[2] for problem in problems] == [
        "another family has this name",
        "another family has this name",
        "toy_family:read_config is not a Family of this name",
        "it cannot be loaded: module 'toy_family' has no attribute 'NOTHING'",
        "it cannot be loaded: No module named 'no_such_package'",
    ]
