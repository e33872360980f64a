"""Draws a result: throughput over clients, latency over load, and the parts of a request."""

from pathlib import Path
from typing import TYPE_CHECKING

from cloze.bench.result import LoadKind, Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(result: Result, file: Path) -> None:
    """Write the plots as a PNG file, a row per set of texts.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(load.label for load in result.arrivals())) or [""]
    figure = Figure(figsize=(16, 4.5 * len(labels)), layout="constrained")
    for row, label in zip(figure.subplots(len(labels), 3, squeeze=False), labels, strict=True):
        throughput, latency, parts = row
        _draw_throughput(throughput, result, label)
        _draw_latency(latency, result, label)
        _draw_parts(parts, result, label)
        for axes in (throughput, latency):
            axes.grid(alpha=0.3)
            if axes.lines:
                axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def _loads(result: Result, subject: str, kind: LoadKind, label: str) -> list[tuple[float, str]]:
    """Return the number and the name of each load of a kind, in ascending order."""
    return sorted(
        (load.number or 0.0, load.name)
        for load in result.arrivals()
        if (load.kind, load.label) == (kind, label) and result.of(subject, load.name)
    )


def _draw_throughput(axes: "Axes", result: Result, label: str) -> None:
    for subject in result.subjects():
        points = [
            (clients, result.median(subject, load, "texts_per_s") or 0.0)
            for clients, load in _loads(result, subject, LoadKind.CLOSED, label)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=subject)
    axes.set(
        title=f"Closed loop, {label}".rstrip(", "), xlabel="clients", ylabel="texts per second"
    )
    axes.set(xscale="log", ylim=(0, None))


def _draw_latency(axes: "Axes", result: Result, label: str) -> None:
    for subject in result.subjects():
        for kind in (LoadKind.POISSON, LoadKind.RECORDED):
            for percentile, style in (("p50", "-"), ("p99", "--")):
                points = [
                    (share, value)
                    for share, load in _loads(result, subject, kind, label)
                    if (value := result.median(subject, load, percentile))
                ]
                if points:
                    name = f"{subject}, {kind}, {percentile}"
                    axes.plot(*zip(*points, strict=True), style, marker=".", label=name)
    axes.set(title=f"Open loop, {label}".rstrip(", "), xlabel="arrivals, share of its own capacity")
    axes.set(ylabel="latency, ms", yscale="log")


def _draw_parts(axes: "Axes", result: Result, label: str) -> None:
    rows = [
        (f"{subject}, {load.name}", parts)
        for load in result.arrivals()
        if load.label == label
        for subject in result.subjects()
        if (parts := result.parts(subject, load.name))
    ]
    starts = [0.0] * len(rows)
    for name in rows[0][1] if rows else ():
        widths = [max(0.0, parts[name]) / sum(parts.values()) for _, parts in rows]
        axes.barh([label for label, _ in rows], widths, left=starts, label=name)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set(title="Where a request's time goes", xlabel="share", xlim=(0, 1))
    axes.tick_params(axis="y", labelsize="small")
    axes.invert_yaxis()
    if rows:
        axes.legend(fontsize="small", loc="lower center", ncols=4, bbox_to_anchor=(0.5, -0.3))
