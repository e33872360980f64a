"""What a soak observed, the checks that it must pass, and the report of both."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np

from cloze.bench.machine import describe_machine
from cloze.bench.report import markdown
from lab.soak.answers import Answers, Outcome
from lab.soak.processes import Fault, ProcessSample, Sample

GROWTH_SHARE, GROWTH_MB = 0.1, 10.0
"""Bound on the growth of a role's memory: a share, and MB beside the share.

A process that starts again has the same memory within these bounds: onnxruntime's arenas and
malloc's free lists differ from start to start.
"""

KEPT_MB_PER_FILE = 0.04
"""Further growth per connection that a process had open at once: measured, 24 to 34 KB.

The allocators keep the memory of closed connections. Their most connections come after faults.
"""

MORE_FILES = 8
"""Bound on the growth of a role's open descriptors at rest: some connections may not be closed."""

REFUSED_OUTSIDE_SHARE = 0.01
"""Most refusals of all requests apart from those after faults."""

RECOVERS_S = 20.0
"""Seconds after a fault in which requests may be refused."""

_SETTLED_S = 5.0
"""Age at which a process has started, so that its memory counts."""

_MIN_MEMORY_S = 60.0
"""Duration of a soak from which memory is compared. In less time nothing settles."""

LEAST_RIGHT_SHARE = 0.5
"""Least share of right answers: a server that refuses all requests passes no soak."""

_LONG_LIFE_S = 200.0
"""Life of a process from which its memory at the end is compared with that at the start."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a soak observed.

    Attributes:
        warm_up_s: after which memory counts.
        rest: before the load and after it, without connections.
    """

    seconds: float
    warm_up_s: float
    sent: int
    answers: Answers
    faults: Sequence[Fault]
    samples: Sequence[Sample]
    rest: tuple[Sample, Sample]
    log: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its name, whether the soak passed, and the figures."""

    name: str
    passed: bool
    figures: str


def checks(observed: Observed) -> list[Check]:
    """Return all checks of a soak."""
    return [
        *_answer_checks(observed),
        _faults_check(observed.faults),
        *_memory_checks(observed),
        _descriptor_check(observed.rest),
        _log_check(observed.log),
    ]


def _answer_checks(observed: Observed) -> Iterator[Check]:
    answers, sent = observed.answers, observed.sent
    counts, settled = answers.counts(), len(answers.settled)
    yield Check("every request settled", settled == sent, f"{settled} of {sent} requests")
    yield Check(
        "answers equal the first answer to the same request",
        not counts[Outcome.WRONG] and counts[Outcome.RIGHT] >= 2 * len(answers.references),
        f"{counts[Outcome.WRONG]} wrong of {counts[Outcome.RIGHT]}, "
        f"{len(answers.references)} references",
    )
    yield Check(
        f"at least {LEAST_RIGHT_SHARE:.0%} right answers",
        counts[Outcome.RIGHT] >= LEAST_RIGHT_SHARE * sent,
        f"{counts[Outcome.RIGHT] / max(1, sent):.1%}",
    )
    yield Check(
        "no unexpected status", not counts[Outcome.UNEXPECTED], f"{counts[Outcome.UNEXPECTED]}"
    )
    lost, refused = answers.times(Outcome.LOST), answers.times(Outcome.REFUSED)
    unexplained = [
        at_s for at_s in lost if not any(fault.explains_loss(at_s) for fault in observed.faults)
    ]
    yield Check(
        "connections end only with their front end",
        not unexplained,
        f"{len(unexplained)} of {len(lost)} lost answers were not due to a fault",
    )
    outside = [
        at_s
        for at_s in refused
        if not any(0 <= at_s - fault.at_s < RECOVERS_S for fault in observed.faults)
    ]
    yield Check(
        f"at most {REFUSED_OUTSIDE_SHARE:.0%} refusals, apart from {RECOVERS_S:g} s after a fault",
        len(outside) <= REFUSED_OUTSIDE_SHARE * sent,
        f"{len(outside)} of {len(refused)} refusals, {sent} requests",
    )


def _faults_check(faults: Sequence[Fault]) -> Check:
    replaced = [fault for fault in faults if fault.kind.replaces]
    late = [fault for fault in replaced if fault.replaced_s is None]
    longest_s = max((fault.replaced_s or 0.0 for fault in replaced), default=0.0)
    return Check(
        "every process that was killed or stopped is replaced",
        not late,
        f"{len(late)} of {len(replaced)} were not; the longest took {longest_s:.1f} s",
    )


def _memory_checks(observed: Observed) -> Iterator[Check]:
    """Yield a check per role: its resident memory in the last third, over that in the first one."""
    if observed.seconds < _MIN_MEMORY_S:
        return
    begin_s, end_s = observed.warm_up_s, observed.seconds
    third = (end_s - begin_s) / 3
    settled = _settled(observed.samples)
    for role in sorted({process.role for _, process in settled}):
        life = [sample for sample in settled if sample[1].role == role]
        first, last = (begin_s, begin_s + third), (end_s - third, math.inf)
        yield _growth_check(f"memory of {role}, last third over first", life, first, last)
    for pid in sorted({process.pid for _, process in settled}):
        life = [sample for sample in settled if sample[1].pid == pid]
        born_s, died_s = max(begin_s, life[0][0]), life[-1][0]
        quarter = (died_s - born_s) / 4
        if 4 * quarter >= _LONG_LIFE_S:
            second, last = (born_s + quarter, born_s + 2 * quarter), (died_s - quarter, died_s)
            name = f"memory of {life[0][1].role} ({pid}), last quarter of its life over second"
            yield _growth_check(name, life, second, last)


def _settled(samples: Sequence[Sample]) -> list[tuple[float, ProcessSample]]:
    """Return the time and the figures of processes, from some seconds after their start."""
    born: dict[int, float] = {}
    return [
        (sample.at_s, process)
        for sample in samples
        for process in sample.processes
        if sample.at_s - born.setdefault(process.pid, sample.at_s) >= _SETTLED_S
    ]


def _growth_check(
    name: str,
    life: Sequence[tuple[float, ProcessSample]],
    first: tuple[float, float],
    last: tuple[float, float],
) -> Check:
    """Compare the median memory of two spans of time."""
    before, after = _between(life, *first), _between(life, *last)
    if not before or not after:
        return Check(name, passed=False, figures="no sample in one of the two")
    files = _most_files(life, after, last[1]) - _most_files(life, before, first[1])
    before_mb, after_mb = (median(process.rss_mb for process in span) for span in (before, after))
    most_mb = before_mb * (1 + GROWTH_SHARE) + GROWTH_MB + KEPT_MB_PER_FILE * max(0, files)
    figures = f"{before_mb:.1f} MB, then {after_mb:.1f} MB; at most {most_mb:.1f} MB"
    return Check(name, after_mb <= most_mb, figures)


def _between(
    life: Sequence[tuple[float, ProcessSample]], begin_s: float, end_s: float
) -> list[ProcessSample]:
    return [process for at_s, process in life if begin_s <= at_s <= end_s]


def _most_files(
    life: Sequence[tuple[float, ProcessSample]], span: Sequence[ProcessSample], end_s: float
) -> int:
    """Return the most files that the processes of a span had open at once, until its end."""
    pids = {process.pid for process in span}
    return max(process.files for at_s, process in life if at_s <= end_s and process.pid in pids)


def _descriptor_check(rest: tuple[Sample, Sample]) -> Check:
    before, after = ({each.role: each.files for each in sample.processes} for sample in rest)
    grown = [role for role in before if after.get(role, 0) > before[role] + MORE_FILES]
    figures = ", ".join(f"{role} {before[role]} to {after.get(role, 'none')}" for role in before)
    return Check(
        "open files at rest, before and after",
        not grown and before.keys() == after.keys(),
        f"{figures}; at most {MORE_FILES} more",
    )


def _log_check(log: str) -> Check:
    tracebacks = len(re.findall(r"Traceback \(most recent call last\)", log))
    return Check("no traceback in the log", not tracebacks, f"{tracebacks}")


def as_json(observed: Observed, results: Sequence[Check]) -> str:
    """Return the figures as JSON."""
    document = {
        "machine": describe_machine(),
        "seconds": observed.seconds,
        "requests": observed.sent,
        "checks": [asdict(check) for check in results],
        "outcomes": observed.answers.counts(),
        "lost_s": observed.answers.times(Outcome.LOST),
        "refused_s": observed.answers.times(Outcome.REFUSED),
        "faults": [asdict(fault) for fault in observed.faults],
        "examples": observed.answers.examples,
        "samples": [asdict(sample) for sample in observed.samples],
    }
    return json.dumps(document, indent=1) + "\n"


def as_markdown(observed: Observed, results: Sequence[Check]) -> str:
    """Return the checks, the latencies of each task and the faults as tables."""
    latencies = defaultdict[str, list[float]](list)
    for each in observed.answers.settled:
        if each.outcome is Outcome.RIGHT:
            latencies[each.group].append(1000 * each.seconds)
    checked = [(c.name, "yes" if c.passed else "**no**", c.figures) for c in results]
    tasks = [
        (group, str(len(ms)), *(f"{value:.1f}" for value in np.percentile(ms, [50, 99])))
        for group, ms in sorted(latencies.items())
    ]
    faults = [
        (f"{fault.at_s:.0f}", fault.kind.name, fault.role, fault.replaced)
        for fault in observed.faults
    ]
    lines = markdown(["check", "passed", "figures"], checked)
    lines += markdown(["task", "right answers", "p50, ms", "p99, ms"], tasks)
    lines += markdown(["at, s", "fault", "process", "replaced after, s"], faults)
    return "\n".join(lines)
