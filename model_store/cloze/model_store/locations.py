"""The default folders of bundles, used unless a user names a folder.

A checkout keeps bundles in one folder. An installed package reads two folders: the user's folder
and its own.
"""

import os
import tomllib
from pathlib import Path

from cloze.model_store.installation import DISTRIBUTION

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parents[2]

SHIPPED_NAMES = ("cloze-bert", "cloze-bert-tasks", "cloze-distilbert")
"""The bundles that the package ships, in the order in which they are the default of a task."""


def is_checkout(folder: Path) -> bool:
    """Return whether `folder` is the top of a source checkout of this project."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(project.get("project", {}).get("name") == DISTRIBUTION)


SHIPPED_ROOT = (_CHECKOUT / "model_store" if is_checkout(_CHECKOUT) else _PACKAGE) / "bundles"


def user_root() -> Path | None:
    """Return the folder of bundles in the user's data folder; None without a home directory.

    Follow the XDG Base Directory Specification: ``$XDG_DATA_HOME``, or ``~/.local/share`` if the
    variable is unset or names a relative path.
    """
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    if not data.is_absolute():
        data = Path("~/.local/share")
    try:
        return data.expanduser() / "cloze" / "bundles"
    except RuntimeError:
        return None


def default_root(checkout: Path = _CHECKOUT) -> Path:
    """Return the folder for new bundles, used unless the user names another folder.

    A checkout keeps its bundles beside the code. An installed package does not write to its own
    folder: the folder may be read-only, and an upgrade deletes the folder.
    """
    if is_checkout(checkout):
        return SHIPPED_ROOT
    return user_root() or SHIPPED_ROOT


DEFAULT_ROOT = default_root()
