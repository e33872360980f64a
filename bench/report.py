"""Shows a result: a table, and plots."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from bench.result import COMPARED, ONE_LENGTH, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = {
    "texts/s": "texts_per_s",
    "p50 ms": "p50",
    "p90 ms": "p90",
    "p99 ms": "p99",
    "p99.9 ms": "p99.9",
    "CPU s": "cpu_s",
    "memory MB": "rss_mb",
}


def table(result: Result) -> str:
    """Markdown: the machine, the starts, and a row for each subject under each load, medians over turns."""
    lines = [f"# {result.model}", "", f"    {result.command}", ""]
    lines += [f"- {name}: {value}" for name, value in result.machine.items()]
    for environment, versions in result.versions.items():
        lines += [
            f"- {environment}: " + ", ".join(f"{name} {value}" for name, value in versions.items())
        ]
    lines += [f"- {note}" for note in result.notes]
    lines += [
        "- texts: " + ", ".join(f"{name} {value}" for name, value in result.texts.items()),
        f"- date: {result.date}",
        "",
    ]
    if result.starts:
        lines += ["| | start to ready | memory then |", "|---|---|---|"]
        lines += [
            f"| {start.subject} | {start.ready_s:.2f} s | {start.rss_mb:.0f} MB |"
            for start in result.starts
        ] + [""]
    lines += _cells(result)
    if not result.turns:
        return "\n".join(lines) + "\n"
    turns = max(turn.turn for turn in result.turns) + 1
    lines += [
        f"Medians of {turns} turns; all subjects in turn, those of a load on the same texts.",
        "",
    ]
    lines += [
        "| load | subject | " + " | ".join(_COLUMNS) + " | failed |",
        "|---|---|" + "---|" * (len(_COLUMNS) + 1),
    ]
    for load in result.loads():
        for subject in result.subjects():
            if not (found := result.of(subject, load)):
                continue
            cells = [_cell(result.median(subject, load, figure)) for figure in _COLUMNS.values()]
            failed = sum(sum(turn.failed.values()) for turn in found)
            lines.append(f"| {load} | {subject} | " + " | ".join(cells) + f" | {failed or ''} |")
    return "\n".join([*lines, *_ratios(result), *_parts(result)]) + "\n"


def _cells(result: Result) -> list[str]:
    """Engines by length and size of batch; then what ran the same batches, beside the engine of the same size."""
    lines: list[str] = []
    grid = [cell for cell in result.cells if cell.group == ONE_LENGTH]
    for subject in dict.fromkeys(cell.subject for cell in grid):
        its = {(cell.lengths, cell.batch_tokens): cell for cell in grid if cell.subject == subject}
        batches, lengths = (
            sorted({tokens for _, tokens in its}),
            sorted({length for length, _ in its}, key=int),
        )
        lines += [
            f"{subject}, thousand tokens a second (share of the peak); a row a length, a column a batch's tokens:",
            "",
        ]
        lines += [
            "| tokens | " + " | ".join(f"{tokens:,}" for tokens in batches) + " |",
            "|---|" + "---|" * len(batches),
        ]
        for length in lengths:
            row = [its.get((length, tokens)) for tokens in batches]
            lines.append(
                f"| {length} | "
                + " | ".join(f"{_kilo(c.tokens_per_s)} ({c.of_peak:.0%})" if c else "" for c in row)
                + " |"
            )
        lines.append("")
    rest = [cell for cell in result.cells if cell.group == COMPARED]
    if rest:
        lines += ["The same sequences; padding is not counted:", ""]
        lines += [
            "| | tokens | a batch | thousand tokens/s | sequences/s | of the peak | engine over it |",
            "|---|---|---|---|---|---|---|",
        ]
    ours = {(cell.subject, cell.lengths): cell for cell in rest}
    for cell in sorted(rest, key=lambda cell: (cell.subject.split()[0], cell.lengths)):
        engine = ours.get((f"{cell.subject.split()[0]} engine", cell.lengths))
        figures = f"{_kilo(cell.tokens_per_s)} | {cell.sequences_per_s:,.0f} | {cell.of_peak:.0%}"
        ratio = (
            f"{engine.tokens_per_s / cell.tokens_per_s:.2f}"
            if engine and engine is not cell
            else ""
        )
        lines.append(
            f"| {cell.subject} | {cell.lengths} | {cell.batch_tokens:,} | {figures} | {ratio} |"
        )
    return [*lines, ""] if rest else lines


def _kilo(number: float) -> str:
    return f"{number / 1000:,.0f}" if number >= 1e5 else f"{number / 1000:.1f}"


def _ratios(result: Result) -> list[str]:
    """Texts a second of our servers over those of their engines, and of everybody else's servers."""
    subjects = result.subjects()
    servers = [subject for subject in subjects if subject.endswith(" server")]
    peers = [subject for subject in subjects if not subject.endswith((" server", " engine"))]
    rows = []
    for load in (load for load in result.loads() if load.startswith("closed")):
        for server in servers:
            ours = result.median(server, load, "texts_per_s")
            for other in (re.sub(r"( \d+ front ends?)? server$", " engine", server), *peers):
                theirs = result.median(other, load, "texts_per_s")
                if ours and theirs:
                    rows.append(f"| {load} | {server} | {other} | {ours / theirs:.2f} |")
    if not rows:
        return []
    return [
        "",
        "Texts a second of one over those of the other:",
        "",
        "| load | one | other | ratio |",
        "|---|---|---|---|",
        *rows,
    ]


def _parts(result: Result) -> list[str]:
    """Where the time goes, of the subjects that say so."""
    rows = {
        (load, subject): result.parts(subject, load)
        for load in result.loads()
        for subject in result.subjects()
    }
    rows = {place: parts for place, parts in rows.items() if parts}
    if not rows:
        return []
    names = list(next(iter(rows.values())))
    lines = ["", "Where a request's time in the server goes, ms on average:", ""]
    lines += ["| load | subject | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    lines += [
        f"| {load} | {who} | " + " | ".join(_cell(parts[name]) for name in names) + " |"
        for (load, who), parts in rows.items()
    ]
    return lines


def _cell(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _draw_parts(axes: "Axes", result: Result) -> None:
    rows = [
        (f"{subject}, {load}", parts)
        for load in result.loads()
        for subject in result.subjects()
        if (parts := result.parts(subject, load))
    ]
    begins = [0.0] * len(rows)
    for name in rows[0][1] if rows else ():
        widths = [max(0.0, parts[name]) / sum(parts.values()) for _, parts in rows]
        axes.barh([label for label, _ in rows], widths, left=begins, label=name)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set(title="Where a request's time goes", xlabel="share", xlim=(0, 1))
    axes.tick_params(axis="y", labelsize="small")
    axes.invert_yaxis()
    if rows:
        axes.legend(fontsize="small", loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.3))


def draw(result: Result, file: Path) -> None:
    """Plots as a PNG: throughput over clients, latency over load, where the time goes.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.5), layout="constrained")
    throughput, latency, shares = figure.subplots(1, 3)
    for subject in result.subjects():
        closed = {
            int(load.split()[1]): load
            for load in result.loads()
            if load.startswith("closed") and result.of(subject, load)
        }
        if closed:
            found = [
                (clients, result.median(subject, load, "texts_per_s") or 0.0)
                for clients, load in sorted(closed.items())
            ]
            throughput.plot(*zip(*found, strict=True), marker="o", label=subject)
        for kind in ("poisson", "recorded"):
            opened = {
                float(load.split()[1]): load
                for load in result.loads()
                if load.startswith(kind) and result.of(subject, load)
            }
            for percentile, style in (("p50", "-"), ("p99", "--")):
                points = [
                    (rate, value)
                    for rate, load in sorted(opened.items())
                    if (value := result.median(subject, load, percentile))
                ]
                if points:
                    latency.plot(
                        *zip(*points, strict=True),
                        style,
                        marker=".",
                        label=f"{subject}, {kind}, {percentile}",
                    )
    throughput.set(
        title="Closed loop", xlabel="clients", ylabel="texts a second", xscale="log", ylim=(0, None)
    )
    latency.set(
        title="Open loop",
        xlabel="arrivals, share of its own capacity",
        ylabel="latency, ms",
        yscale="log",
    )
    _draw_parts(shares, result)
    for axes in (throughput, latency):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)
