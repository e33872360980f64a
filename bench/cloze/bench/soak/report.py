"""Writes what a soak observed: JSON, a Markdown table, and a PNG with three plots."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloze.bench.soak.answers import BUCKET_S, Outcome
from cloze.bench.soak.traffic import BAD
from cloze.bench.soak.verdict import Check, Observed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 90


def as_json(observed: Observed, checks: Sequence[Check], machine: Mapping[str, str]) -> str:
    """Return the figures as JSON: the checks, the faults, and a row per 5 s and per sample."""
    answers = observed.answers
    document = {
        "machine": dict(machine),
        "seconds": observed.seconds,
        "requests": observed.sent,
        "checks": [
            {"name": check.name, "passed": check.passed, "figures": check.figures}
            for check in checks
        ],
        "outcomes": {outcome: answers.outcomes[outcome] for outcome in Outcome},
        "faults": [
            {
                "at_s": round(fault.at_s, 2),
                "kind": fault.kind.name,
                "role": fault.role,
                "replaced_s": fault.replaced_s and round(fault.replaced_s, 2),
            }
            for fault in observed.faults
        ],
        "examples": [
            {"at_s": round(example.at_s, 2), "outcome": example.outcome, "text": example.text}
            for example in answers.examples
        ],
        "answers": [
            {
                "from_s": number * BUCKET_S,
                "statuses": dict(sorted(bucket.statuses.items())),
                "p50_p99_ms": {
                    group: _percentiles_ms(latencies)
                    for group, latencies in sorted(bucket.latencies.items())
                },
            }
            for number, bucket in sorted(answers.buckets.items())
        ],
        "processes": [
            {
                "at_s": round(sample.at_s, 2),
                "roles": {
                    process.role: {
                        "pid": process.pid,
                        "rss_mb": round(process.rss_mb, 1),
                        "pss_mb": round(process.pss_mb, 1),
                        "files": process.files,
                        "threads": process.threads,
                    }
                    for process in sample.processes
                },
            }
            for sample in observed.samples
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _percentiles_ms(latencies: Sequence[float]) -> list[float]:
    """Return p50 and p99 in milliseconds."""
    return [round(float(value) * 1e3, 1) for value in np.percentile(latencies, [50, 99])]


def as_markdown(observed: Observed, checks: Sequence[Check]) -> str:
    """Return the checks, the latencies of each task and the faults as tables."""
    lines = ["| check | passed | figures |", "|---|---|---|"]
    lines += [
        f"| {check.name} | {'yes' if check.passed else '**no**'} | {check.figures} |"
        for check in checks
    ]
    lines += ["", "| task | right answers | p50, ms | p99, ms |", "|---|---|---|---|"]
    latencies: dict[str, list[float]] = {}
    for bucket in observed.answers.buckets.values():
        for group, values in bucket.latencies.items():
            latencies.setdefault(group, []).extend(values)
    for group, values in sorted(latencies.items()):
        p50, p99 = _percentiles_ms(values)
        title = "bad requests" if group == BAD else group
        lines.append(f"| {title} | {len(values)} | {p50} | {p99} |")
    lines += ["", "| at, s | fault | process | replaced after, s |", "|---|---|---|---|"]
    for fault in observed.faults:
        replaced = "" if fault.replaced_s is None else f"{fault.replaced_s:.1f}"
        lines.append(f"| {fault.at_s:.0f} | {fault.kind.name} | {fault.role} | {replaced} |")
    return "\n".join(lines) + "\n"


def draw(observed: Observed, file: Path) -> None:
    """Write three plots over time: memory, latency, and answers that are not right.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), layout="constrained")
    memory, latency, errors = figure.subplots(3, 1, sharex=True)
    _draw_memory(memory, observed)
    _draw_latency(latency, observed)
    _draw_errors(errors, observed)
    for axes in (memory, latency, errors):
        for fault in observed.faults:
            axes.axvline(fault.at_s, color="grey", linewidth=0.6, linestyle=":")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper right", ncols=3)
    errors.set(xlabel="seconds; dotted lines are faults")
    figure.savefig(file, dpi=_DPI)


def _draw_memory(axes: "Axes", observed: Observed) -> None:
    roles = sorted({process.role for sample in observed.samples for process in sample.processes})
    for role in roles:
        points = [
            (sample.at_s, process.pss_mb)
            for sample in observed.samples
            for process in sample.processes
            if process.role == role
        ]
        axes.plot(*zip(*points, strict=True), label=role)
    totals = [(sample.at_s, sample.pss_mb) for sample in observed.samples]
    if totals:
        axes.plot(*zip(*totals, strict=True), label="all", color="black")
    axes.set(title="Memory (PSS)", ylabel="MB", ylim=(0, None))


def _draw_latency(axes: "Axes", observed: Observed) -> None:
    buckets = sorted(observed.answers.buckets.items())
    groups = sorted({group for _, bucket in buckets for group in bucket.latencies})
    for number, group in enumerate(groups):
        points = [
            (index * BUCKET_S, *_percentiles_ms(bucket.latencies[group]))
            for index, bucket in buckets
            if group in bucket.latencies
        ]
        times, p50, p99 = zip(*points, strict=True)
        axes.plot(times, p50, color=f"C{number}", label=f"{group}, p50")
        axes.plot(times, p99, color=f"C{number}", linestyle="--", linewidth=0.8, label="p99")
    axes.set(title="Latency of right answers", ylabel="ms", yscale="log")


def _draw_errors(axes: "Axes", observed: Observed) -> None:
    buckets: list[tuple[int, Any]] = sorted(observed.answers.buckets.items())
    times = [number * BUCKET_S for number, _ in buckets]
    statuses = sorted({status for _, bucket in buckets for status in bucket.statuses})
    for status in statuses:
        counts = [bucket.statuses[status] / BUCKET_S for _, bucket in buckets]
        axes.plot(times, counts, label="connection ended" if status == 0 else str(status))
    axes.set(title="Answers by status", ylabel="per second", yscale="symlog", ylim=(0, None))
