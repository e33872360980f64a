"""The source folders of the project, each with a part of the namespace `cloze`.

Documents and tables call a module by its package: `service/core.py` is the module
`cloze.service.core`, in the file `service/cloze/service/core.py`.
"""

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
FOLDERS = ("client", *_BUILD["dev-mode-dirs"])


def python_path(checkout: Path = ROOT) -> str:
    """Return the variable PYTHONPATH for the sources of a checkout."""
    return os.pathsep.join(str(checkout / folder) for folder in FOLDERS)


def file_of(name: str, checkout: Path = ROOT) -> Path:
    """Return the file of a module, or the folder of a package, by its name in documents."""
    package, *rest = Path(name).parts
    folder = checkout / package / "cloze" / package
    in_package = folder.is_dir() and rest[:1] != ["cloze"]
    return folder.joinpath(*rest) if in_package else checkout / name


def name_of(file: Path, checkout: Path = ROOT) -> str:
    """Return the name of a module or a package in documents, by its file or its folder."""
    parts = file.relative_to(checkout).parts
    return "/".join(parts[2:] if parts[1:2] == ("cloze",) else parts)
