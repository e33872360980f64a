"""Draws the quality of pruned models over their speed, from the tables of the result page.

    python bench/studies/pruning_plot.py bench/results/pruning-cpu.md

The PNG file lies beside the page. A point is a run; its label is the share that it keeps.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

SHAPE = "1 x 128"
PRECISIONS = ("fp32", "int8")
FIGURES = ("masked words found", "Spearman on STS-B")

Row = Mapping[str, str]


def rows_of(page: str, column: str) -> list[Row]:
    """Return the rows of the last table that has a column of this name."""
    found: list[Row] = []
    for block in page.split("\n\n"):
        cells = [line.split("|")[1:-1] for line in block.splitlines() if line[:1] == "|"]
        lines = [[cell.strip() for cell in row] for row in cells]
        if lines and column in lines[0]:
            found = [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]
    return found


def main() -> None:
    """Draw each figure over the speed of each precision."""
    from matplotlib.figure import Figure

    file = Path(sys.argv[1])
    page = file.read_text()
    speeds = {
        row["share"]: row for row in rows_of(page, "fp32") if row["sequences x tokens"] == SHAPE
    }
    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(FIGURES)), FIGURES, strict=True):
        for precision in PRECISIONS:
            points = [
                (float(speeds[row["share"]][f"{precision}, times as fast"]), row)
                for row in rows_of(page, name)
                if row["share"] in speeds
            ]
            values = [float(row[name].removesuffix(" %")) for _, row in points]
            axes.plot([speed for speed, _ in points], values, "o", label=precision)
            for (speed, row), value in zip(points, values, strict=True):
                place = {"textcoords": "offset points", "xytext": (4, 5)}
                axes.annotate(row["share"], (speed, value), fontsize="small", **place)
        axes.set(
            title=name,
            xlabel=f"times as fast, {SHAPE} tokens",
            ylabel="% of the words" if "words" in name else "rank correlation",
        )
        axes.margins(0.12)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(file.with_suffix(".png"), dpi=100)


if __name__ == "__main__":
    main()
