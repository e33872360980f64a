"""Files of a bundle: kinds, sizes, processors, folders and errors in one line."""

import os
import socket
from pathlib import Path

import pytest

from cloze.model_store import processor
from cloze.model_store.error_lines import printable
from cloze.model_store.installation import DISTRIBUTION
from cloze.model_store.locations import SHIPPED_ROOT, default_root, is_checkout, user_root
from cloze.model_store.plain_files import open_plain


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, kind in (
            ("link", "a symbolic link"),
            ("folder", "a folder"),
            ("pipe", "a named pipe"),
            ("socket", "a socket"),
        ):
            with pytest.raises(ValueError, match=f"is {kind}; a bundle has regular files only"):
                open_plain(tmp_path / name)
    with pytest.raises(ValueError, match="is a device"):
        open_plain(Path("/dev/null"))
    with open_plain(tmp_path / "file") as stream:
        assert not os.get_inheritable(stream.fileno())
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "missing")


INTEL = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\nbugs : avx_vnni\n"


@pytest.mark.parametrize(
    ("text", "instructions", "advantage"),
    [
        (INTEL, ["avx512_vnni"], "avx512_vnni"),
        ("flags : avx_vnni avx512_vnni\n", ["avx512_vnni", "avx_vnni"], "avx512_vnni, avx_vnni"),
        ("Features : fp asimddp i8mm\n", ["asimddp", "i8mm"], "asimddp, i8mm"),
        ("flags : avx2\n", [], "avx2"),
        ("flags : avx2 avx512f\n", [], None),
        ("flags : sse2\n", [], None),
        ("model name : avx2\n", [], None),
    ],
)
def test_what_makes_int8_fast(
    text: str, instructions: list[str], advantage: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "cpuinfo")
    assert processor.int8_instructions() == instructions
    assert processor.int8_advantage() == advantage
    monkeypatch.setattr(processor, "CPU_INFO", tmp_path / "missing")
    assert processor.int8_instructions() == []


def test_a_checkout_keeps_its_bundles_and_a_user_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_checkout(tmp_path)
    for text, expected in (
        (f'[project]\nname = "{DISTRIBUTION}"', True),
        ('[project]\nname = "other"', False),
        ("[tool.x]", False),
        ("no toml", False),
    ):
        (tmp_path / "pyproject.toml").write_text(text)
        assert is_checkout(tmp_path) is expected
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "{DISTRIBUTION}"')
    assert default_root(tmp_path) == SHIPPED_ROOT
    monkeypatch.setenv("HOME", str(tmp_path))
    for data, folder in (
        ("/data", Path("/data/cloze/bundles")),
        ("relative", tmp_path / ".local/share/cloze/bundles"),
        (None, tmp_path / ".local/share/cloze/bundles"),
    ):
        monkeypatch.delenv("XDG_DATA_HOME", raising=False)
        if data:
            monkeypatch.setenv("XDG_DATA_HOME", data)
        assert default_root(tmp_path / "else") == user_root() == folder


def test_a_line_shows_no_control_characters_and_is_cut() -> None:
    assert printable("a\nb\x1b[2J\N{SNOWMAN}") == "a\\nb\\x1b[2J\N{SNOWMAN}"
    assert printable("a" * 400) == "a" * 400
    assert printable("a" * 401) == "a" * 400 + "..."
