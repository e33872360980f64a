"""How this package was installed, what it was built from, and the command that installs more."""

import functools
import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "cloze-server"
"""The name on a package index. The name ``cloze`` belongs to another project there."""


class Build(NamedTuple):
    """The version of this package, and the git revision that it was built from.

    Attributes:
        revision: the first 12 digits of the commit; "unknown" for a wheel, which has none.
    """

    version: str
    revision: str

    def __str__(self) -> str:
        return f"{self.version}, revision {self.revision}"


@functools.cache
def build() -> Build:
    """Return what this package was built from.

    pip records the commit of a package that it gets from git, as `scripts/install-serving` does.
    For an editable installation, git has the revision of the checkout.
    """
    commit = _recorded().get("vcs_info", {}).get("commit_id", "")[:12]
    return Build(distribution(DISTRIBUTION).version, commit or _checked_out() or "unknown")


def _checked_out() -> str:
    """Return the revision of the checkout that this file is in; "" if it is in none."""
    git = Path(__file__).resolve().parents[3] / ".git"  # a file in a worktree
    if not git.exists():
        return ""
    command = ("git", f"--git-dir={git}", "rev-parse", "--short=12", "HEAD")
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or not its user's checkout
        return ""


def install_command(*extras: str) -> str:
    """Return the command that adds extras to the installed package, from where it came from.

    The origin is a checkout, a wheel, or a package index.
    """
    wanted = f"[{','.join(extras)}]"
    origin = _origin()
    if origin is None:
        target = f"'{DISTRIBUTION}{wanted}'"
    elif origin.is_dir():
        target = f"--editable '{origin}{wanted}'"
    else:
        target = f"'{DISTRIBUTION}{wanted} @ {origin.as_uri()}'"
    return f"{sys.executable} -m pip install {target}"


def _origin() -> Path | None:
    """Return the checkout or the wheel that the package was installed from, if it still exists."""
    url = urlsplit(_recorded().get("url", ""))
    if url.scheme != "file":
        return None
    path = Path(url2pathname(url.path))
    return path if path.exists() else None


def _recorded() -> dict[str, Any]:
    """Return what pip recorded of the package's origin: PEP 610, ``direct_url.json``."""
    try:
        recorded = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return {}
    return dict(json.loads(recorded)) if recorded else {}
