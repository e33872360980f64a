"""The locks of the images agree with constraints.txt and pyproject.toml, for two processors."""

import importlib.metadata
import json
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

AARCH64 = [
    word
    for tag in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 37)))
    for word in ("--platform", f"{tag}_aarch64")
]
"""Platforms whose wheels the base image can load: Debian 12 has glibc 2.36."""


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


def test_the_serving_locks_differ_only_in_the_backend() -> None:
    cpu, gpu = pins(lock("cpu")).keys(), pins(lock("gpu")).keys()
    assert cpu - gpu == {"onnxruntime"}
    assert {name for name in gpu - cpu if not name.startswith("nvidia-")} == {"onnxruntime-gpu"}


# ---- the index, asked ------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", EXTRAS)
def test_every_package_has_a_locked_file_for_aarch64(target: str, tmp_path: Path) -> None:
    """pip would install each from a wheel whose hash is in the lock; only metadata is fetched
    where the index offers it.
    """
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
        *("--only-binary", ":all:", "--require-hashes", "--no-deps", *AARCH64),
        *("--python-version", "3.11", "--implementation", "cp", "--target", str(tmp_path / "none")),
        *("--report", str(report), "--requirement", str(ROOT / f"locks/{target}.txt")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    chosen = json.loads(report.read_text())["install"]
    names = {canonicalize_name(each["metadata"]["name"]) for each in chosen}
    assert names == pins(lock(target)).keys()
    files = [each["download_info"]["url"].rsplit("/", 1)[1] for each in chosen]
    assert not [name for name in files if "x86_64" in name]
    assert [name for name in files if "aarch64" in name]
    for each in chosen:
        digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
        assert f"sha256:{digest}" in lock(target)
