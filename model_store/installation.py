"""How this package was installed, and the command that installs more of it."""

import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "cloze-server"
"""The name on a package index. The name ``cloze`` belongs to another project there."""


def install_command(*extras: str) -> str:
    """Return the command that adds extras to the installed package, from where it came from.

    The origin is a checkout, a wheel, or a package index. Source: PEP 610, ``direct_url.json``.
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
    try:
        recorded = distribution(DISTRIBUTION).read_text("direct_url.json")
    except PackageNotFoundError:
        return None
    url = urlsplit(json.loads(recorded)["url"]) if recorded else None
    if url is None or url.scheme != "file":
        return None
    path = Path(unquote(url.path))
    return path if path.exists() else None
