"""The command blocks of the documents: which are run by the tests, and why others are not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))

_COMMAND = re.compile(
    r"(\.venv(-serving)?/bin/\S+|cloze|curl|docker|eval|git|kubectl|make|mkdir|pip|python3?|uv|"
    r"[A-Z_]+=\S+) ?"
)
_MARK = re.compile(r"<!-- (?:(not run|status): (.+)|(slow)) -->")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of commands, and its mark: why or when the tests do not run it, and a status."""

    document: str
    line: int
    text: str
    not_run: str
    slow: bool
    status: int


def blocks(document: Path) -> Iterator[Block]:
    """Yield the blocks of indented lines that begin with a command."""
    lines = document.read_text().splitlines()
    number = 0
    mark: tuple[str, str] | None = None
    while number < len(lines):
        line = lines[number]
        if found := _MARK.fullmatch(line.strip()):
            mark = (found[1] or found[3], found[2] or "")
        elif re.match(r" {4,}\S", line) and not lines[number - 1].strip():
            end, is_command = number, _COMMAND.match(line.strip()) is not None
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
                if not lines[end].strip() and not (is_command and _is_command(lines, end + 1)):
                    break
                end += 1
            text = "\n".join(lines[number:end]).rstrip()
            if is_command:
                kind, value = mark or ("", "")
                yield Block(
                    document.name,
                    number + 1,
                    text,
                    value if kind == "not run" else "",
                    kind == "slow",
                    int(value) if kind == "status" else 200,
                )
            mark = None
            number = end
            continue
        elif line.strip():
            mark = None
        number += 1


def _is_command(lines: list[str], number: int) -> bool:
    return (
        number < len(lines)
        and lines[number].startswith("    ")
        and _COMMAND.match(lines[number].strip()) is not None
    )
