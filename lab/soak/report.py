"""Writes what a soak observed: JSON, and Markdown tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from lab.soak.answers import BUCKET_S, Outcome
from lab.soak.traffic import BAD
from lab.soak.verdict import Check, Observed


def as_json(observed: Observed, checks: Sequence[Check], machine: Mapping[str, str]) -> str:
    """Return the figures as JSON: the checks, the faults, and a row per 5 s and per sample."""
    answers = observed.answers
    document = {
        "machine": dict(machine),
        "seconds": observed.seconds,
        "requests": observed.sent,
        "checks": [asdict(check) for check in checks],
        "outcomes": {outcome: answers.outcomes[outcome] for outcome in Outcome},
        "faults": [asdict(fault) for fault in observed.faults],
        "examples": [asdict(example) for example in answers.examples],
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
        "samples": [asdict(sample) for sample in observed.samples],
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
