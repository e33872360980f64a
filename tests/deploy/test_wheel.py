"""An installed wheel works away from the checkout: it serves what it ships and writes to the user's
data folder.
"""

import os
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from cloze.model_store.locations import SHIPPED_ROOT, default_root
from tests.support.command import call
from tests.support.serving import bare_environment, running_server
from tests.support.wheels import NOT_SOURCE, build, pip

ROOT = Path(__file__).parents[2]
SHIPPED = ["cloze-bert", "cloze-bert-tasks", "cloze-distilbert"]


@dataclass(frozen=True, slots=True)
class Install:
    """A wheel unpacked by pip, and the home of a user."""

    target: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.target), "HOME": str(self.home)}

    @property
    def user_root(self) -> Path:
        return self.home / ".local/share/cloze/bundles"

    def cloze(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "cloze", *arguments, **environment)

    def python(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return call(
            sys.executable,
            *arguments,
            check=False,
            cwd=self.home,
            env=bare_environment(COLUMNS="200", **self.environment) | environment,
            timeout=120,
        )

    def listed(self, **environment: str) -> list[str]:
        done = self.cloze("store", "list", **environment)
        assert done.returncode == 0, done.stderr
        return [line.split()[0] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy, where no earlier build left files."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_SOURCE)
    return build(folder / "source", folder)


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of the client alone."""
    folder = tmp_path_factory.mktemp("client-wheel")
    shutil.copytree(ROOT / "client", folder / "source", ignore=NOT_SOURCE)
    return build(folder / "source", folder)


@pytest.fixture(scope="module")
def target(wheel: Path, client_wheel: Path) -> Path:
    """Unpack both wheels."""
    folder = wheel.parent / "target"
    pip(
        "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel), str(client_wheel)
    )
    return folder


@pytest.fixture
def install(target: Path, tmp_path: Path) -> Install:
    return Install(target, tmp_path)


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_its_bundles_are_listed_and_whole_and_nothing_is_written(install: Install) -> None:
    assert install.listed() == [f"{name}@1" for name in SHIPPED]
    verified = install.cloze("store", "verify").stdout.splitlines()
    assert [line.split() for line in verified] == [[f"{name}@1", "ok"] for name in SHIPPED]
    assert list(install.home.iterdir()) == []


@pytest.mark.slow
def test_an_export_goes_to_the_user_and_is_served_beside_what_ships(
    install: Install, checkpoints: dict[str, Path]
) -> None:
    before = files_in(install.target)
    done = install.cloze("export", str(checkpoints["distilbert"]), "--name", "mine")
    assert done.returncode == 0, done.stderr
    assert f"in {install.user_root / 'mine' / '1'}\n" in done.stdout
    assert files_in(install.target) == before, "the package is not for writing"
    assert install.listed() == [*(f"{name}@1" for name in SHIPPED), "mine@1"]
    assert install.listed(CLOZE_MODEL_STORE=str(install.home / "other")) == []

    with running_server(None, cwd=install.home, **install.environment) as server:
        for model in ("mine", "cloze-bert"):
            body = {"inputs": "a city", "model": model}
            httpx.post(f"{server.url}/embed", json=body).raise_for_status()


def test_a_user_without_a_home_reads_what_ships(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container's user may be a number without an entry in /etc/passwd."""

    def no_entry(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    assert default_root(tmp_path) == SHIPPED_ROOT


CLIENT = ["httpx", "numpy", "tqdm"]
"""What the client needs."""

ASK = """
import json, sys
from cloze.client import Client
with Client(sys.argv[1]) as client:
    print(client.embed(["a", "b"]).shape, client.info()["models"] != [])
print(*sorted(name for name in sys.modules if name.startswith("cloze.")))
"""


def isolated(folder: Path) -> Path:
    """Return the Python of a new environment, which has what the client needs and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    for name in _with_requirements(CLIENT):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (site / top).exists():
                (site / top).symlink_to(distribution(name).locate_file(top))
    return python


def _with_requirements(names: list[str]) -> set[str]:
    """Return the names of distributions, and of all that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            required = map(Requirement, distribution(name).requires or ())
            waiting += [r.name for r in required if not r.marker or r.marker.evaluate()]
    return found


@pytest.mark.slow
def test_the_client_alone_is_small_and_asks_a_server(
    client_wheel: Path, tmp_path: Path, tiny_store: Path
) -> None:
    assert client_wheel.stat().st_size < 100_000
    python = isolated(tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(client_wheel) as archive:
        archive.extractall(site)
    lacks = call(python, "-c", "import pydantic", check=False)
    assert "ModuleNotFoundError" in lacks.stderr
    with running_server(tiny_store) as server:
        done = call(python, "-I", "-c", ASK, server.url, check=False, cwd=tmp_path, timeout=60)
    shape, modules = done.stdout.splitlines() or [done.stderr, ""]
    assert shape == "(2, 64) True"
    assert all(name.startswith("cloze.client") for name in modules.split())


@pytest.mark.slow
def test_the_distributions_share_no_file(wheel: Path, client_wheel: Path) -> None:
    """So one can be removed, or replaced, without the other."""
    with zipfile.ZipFile(wheel) as server, zipfile.ZipFile(client_wheel) as client:
        assert set(server.namelist()) & set(client.namelist()) == set()


def test_both_distributions_say_the_same() -> None:
    server, client = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in (".", "client")
    )
    for field in ("version", "requires-python"):
        assert client[field] == server[field]
    assert [re.match(r"\w+", needed)[0] for needed in client["dependencies"]] == CLIENT  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_fresh_environment_serves_and_what_it_lacks_is_a_command_away(
    wheel: Path, client_wheel: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The way of a user who has the wheels: serve, read what export needs, install it, export."""
    python = tmp_path / "venv" / "bin" / "python"
    command = python.with_name("cloze")
    environment = bare_environment(HOME=str(tmp_path), PATH=os.environ["PATH"])
    constraints = str(ROOT / "constraints.txt")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return call(*arguments, check=False, cwd=tmp_path, env=environment)

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip_install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints]
    wheels = (f"cloze-client @ {client_wheel.as_uri()}", f"cloze-server[cpu] @ {wheel.as_uri()}")
    subprocess.run([*pip_install, *wheels], check=True)
    serve = (str(command), "serve")
    with running_server(None, command=serve, cwd=tmp_path, HOME=str(tmp_path)) as server:
        assert httpx.post(f"{server.url}/embed", json={"inputs": "a"}).status_code == 200
    export = (str(command), "export", str(checkpoints["bert"]), "--name", "mine")
    refused = run(*export)
    assert refused.returncode == 1
    install = refused.stderr.strip().splitlines()[-1].split("install it with: ")[1]
    subprocess.run(
        shlex.split(install), env=environment | {"PIP_CONSTRAINT": constraints}, check=True
    )
    exported = run(*export)
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / ".local/share/cloze/bundles/mine/1").is_dir()
    assert "mine@1" in run(str(command), "store", "list").stdout


@pytest.mark.slow
def test_the_wheel_is_typed_and_is_what_runs(install: Install) -> None:
    done = install.python("-c", "import cloze.cli; print(cloze.cli.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(install.target), done.stderr
    version = install.cloze("--version").stdout
    assert re.fullmatch(r"cloze, version [\d.]+, revision unknown\n", version), version
    for part in ("", "bench", "client", "export", "model_store", "service"):
        assert (install.target / "cloze" / part / "py.typed").is_file(), part
    names = {path.name for path in install.target.iterdir() if path.suffix != ".dist-info"}
    assert names - {"bin"} == {"cloze"}
