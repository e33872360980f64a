"""Names what moved between two results: beyond what turns of one result differ among themselves."""

from dataclasses import dataclass

from bench.result import Result

_FIGURES = {"texts_per_s": 1, "p50": -1, "p99": -1, "rss_mb": -1}
"""Figure -> whether more is better."""

_LEAST = 0.03
"""Share below which no difference counts, however steady the turns were."""


@dataclass(frozen=True, slots=True)
class Move:
    """One figure in two results.

    Attributes:
        change: (after - before) / before.
        noise: half the spread of the turns over their median, the larger of the two results.
        verdict: better, worse, or same.
    """

    subject: str
    load: str
    figure: str
    before: float
    after: float
    change: float
    noise: float
    verdict: str


def compare(before: Result, after: Result) -> list[Move]:
    """Every figure that both results have, in the order of the second."""
    moves = []
    for load in after.loads():
        for subject in after.subjects():
            for figure, sign in _FIGURES.items():
                old, new = before.median(subject, load, figure), after.median(subject, load, figure)
                if not old or new is None:
                    continue
                change = (new - old) / old
                noise = max(_noise(result, subject, load, figure) for result in (before, after))
                moved = abs(change) > max(noise, _LEAST)
                verdict = ("better" if change * sign > 0 else "worse") if moved else "same"
                moves.append(Move(subject, load, figure, old, new, change, noise, verdict))
            failed = [_failed(result, subject, load) for result in (before, after)]
            if None not in failed and failed[0] != failed[1]:
                old_share, new_share = (share or 0.0 for share in failed)
                verdict = "worse" if new_share > old_share else "better"
                moves.append(
                    Move(
                        subject,
                        load,
                        "failed",
                        old_share,
                        new_share,
                        new_share - old_share,
                        0.0,
                        verdict,
                    )
                )
    return moves


def _failed(result: Result, subject: str, load: str) -> float | None:
    """The share of requests that were not answered with 200; None where the load was not put."""
    found = result.of(subject, load)
    failed = sum(sum(turn.failed.values()) for turn in found)
    return failed / (failed + sum(turn.answered for turn in found) or 1) if found else None


def _noise(result: Result, subject: str, load: str, figure: str) -> float:
    values = [
        turn.latency_ms.get(figure, getattr(turn, figure, None))
        for turn in result.of(subject, load)
    ]
    numbers = [value for value in values if value]
    middle = result.median(subject, load, figure)
    return (max(numbers) - min(numbers)) / 2 / middle if numbers and middle else 0.0


def table(moves: list[Move], *, every: bool = False) -> str:
    """Markdown: what moved, or everything."""
    shown = [move for move in moves if every or move.verdict != "same"]
    if not shown:
        return f"nothing moved: {len(moves)} figures are the same within their turns' spread\n"
    lines = [
        "| load | subject | figure | before | after | change | turns differ by | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for m in shown:
        moved = f"{m.before:.4g} | {m.after:.4g} | {m.change:+.1%} | {m.noise:.1%} | {m.verdict}"
        lines.append(f"| {m.load} | {m.subject} | {m.figure} | {moved} |")
    return "\n".join(lines) + "\n"
