"""The locks of the images agree with constraints.txt and pyproject.toml, for two processors."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {"cpu": ("cpu", "traces"), "gpu": ("gpu", "traces"), "export": ("cpu", "export")}
TARGETS = (*EXTRAS, "build")

LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
LINUX |= {"python_version": "3.11", "python_full_version": "3.11.9"}


def pins(text: str) -> dict[str, str]:
    """Return the version of each pinned package by its normalised name."""
    found = re.findall(r"^([\w.-]+)==([\w.+!-]+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def lock(target: str) -> str:
    return (ROOT / f"locks/{target}.txt").read_text()


CONSTRAINTS = pins((ROOT / "constraints.txt").read_text())


@pytest.mark.parametrize("target", TARGETS)
def test_every_pin_is_that_of_the_constraints_and_has_hashes(target: str) -> None:
    """An option could name an index, and a line without a hash would be trusted as it comes."""
    locked = pins(lock(target))
    assert locked
    assert locked == {name: CONSTRAINTS.get(name) for name in locked}
    lines = [line for line in lock(target).splitlines() if not line.startswith("#")]
    hashed = r"[\w.-]+==[\w.+!-]+( \\\n    --hash=sha256:[0-9a-f]{64})+"
    for entry in re.split(r"\n(?=\S)", "\n".join(lines)):
        assert re.fullmatch(hashed, entry), entry[:200]
    assert not re.search(r"://|index-url|trusted-host", lock(target))
    without = {"cloze-client"} | ({"torch"} if target == "export" else set())
    assert required(target) - without <= locked.keys()


def required(target: str) -> set[str]:
    """Return what pyproject.toml names for a target."""
    if target == "build":
        named = PROJECT["dependency-groups"]["image"]
    else:
        optional = PROJECT["project"]["optional-dependencies"]
        named = [*PROJECT["project"]["dependencies"]]
        named += [each for extra in EXTRAS[target] for each in optional[extra]]
    requirements = [Requirement(each) for each in named]
    return {
        canonicalize_name(each.name)
        for each in requirements
        if each.marker is None or each.marker.evaluate(LINUX)
    }


def test_every_dependency_of_what_serves_is_locked_and_no_other() -> None:
    """The closure, read from the installed packages; the network is not asked."""
    wanted, queue = set[str](), [Requirement(name) for name in required("cpu")]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        wanted.add(name)
        for line in importlib.metadata.requires(name) or []:
            each = Requirement(line)
            applies = each.marker is None or each.marker.evaluate(LINUX | {"extra": ""})
            if applies and canonicalize_name(each.name) not in wanted:
                queue.append(each)
    assert wanted - {"cloze-client"} == pins(lock("cpu")).keys()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_locks_are_what_the_script_writes(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts/lock-images", tmp_path], check=True, timeout=500
    )
    for target in TARGETS:
        written = (tmp_path / f"{target}.txt").read_text()
        assert pins(written) == pins(lock(target)), "run scripts/lock-images"
        # A file that was added to a version later has a hash that an older lock does not have.
        assert set(hashes(lock(target))) <= set(hashes(written))


def hashes(text: str) -> list[str]:
    return re.findall(r"sha256:[0-9a-f]{64}", text)
