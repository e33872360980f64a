"""`cloze bench engines` measures engines on the same weights, and leaves out what does not start."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from cloze.cli import cli


def _measure(store: Path, checkpoint: Path, folder: Path, *engines: str) -> list[list[str]]:
    """Return the cells of the table's rows, and the lines below the table as rows of one cell."""
    work, pairs = folder / "work", folder / "pairs.csv"
    shutil.copytree(checkpoint, work)
    pairs.write_text("the king,the queen,4\na dog,the market,1\nthe old song,a new song,3\n")
    command = ["bench", "engines", str(work), "--model", "bert", "--model-store", str(store)]
    command += [part for engine in engines for part in ("--engine", engine)]
    command += ["--threads", "1,2", "--batches", "1,2", "--lengths", "8", "--rounds", "1"]
    command += ["--seconds", "0", "--pairs", str(pairs)]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    return [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]


def test_cloze_beside_the_same_weights_as_torch_exports_them(
    tiny_store: Path, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    engines = ("cloze fp32", "cloze int8", "onnxruntime fp32", "onnxruntime int8")
    rows = _measure(tiny_store, checkpoints["bert"], tmp_path, *engines)
    for number, first in ((1, 0), (2, 7)):
        titles, _, ours, plain, rounded, over, nothing = rows[first : first + 7]
        assert titles[1:5] == [f"{number} threads, ms", "1 x 8", "2 x 8", "Spearman"]
        assert [row[1] for row in (ours, plain, rounded)] == [engines[0], *engines[2:]]
        assert ours[4] == plain[4] != ""  # the same vectors
        assert float(over[2]) == pytest.approx(float(ours[2]) / float(plain[2]), rel=0.05)
        assert nothing == [""]
    assert rows[14:] == [["- cloze int8 is left out: the bundle bert has no graph in int8"]]


@pytest.mark.parametrize("engine", ["openvino-streams fp32", "openvino int8", "ctranslate2 fp32"])
def test_an_installed_engine_makes_the_same_vectors(
    tiny_store: Path, checkpoints: dict[str, Path], tmp_path: Path, engine: str
) -> None:
    module = engine.split()[0].removesuffix("-streams")
    pytest.importorskip(module, reason=f"{module} is not installed")
    rows = _measure(tiny_store, checkpoints["bert"], tmp_path, "cloze fp32", engine)
    assert rows[3][1] == engine
    assert rows[3][4] == rows[2][4]
