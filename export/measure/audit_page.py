"""Writes an audit as one HTML page with plots, which loads nothing else."""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from cloze.export.measure.audit import MEANINGS, Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { width: 15rem; height: 1.4rem; display: block; }
.note { color: #555; }
"""

_WIDTH, _HEIGHT = 240, 22
_LIMITS = """
<p>A line is the 95 % interval by bootstrap, a dot the value, and a grey line the value without
preference. The interval covers the choice of sentences and words. It does not cover whether they
are right for your use: a model without a preference here can still treat people unequally.</p>
"""


def audit_page(source: str, figures: Sequence[Figure]) -> str:
    """Return the page."""
    title = f"Audit of {escape(source)}"
    sections = "".join(
        _section(measure, list(group))
        for measure, group in groupby(figures, key=lambda figure: figure.measure)
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n<h1>{title}</h1>\n{_LIMITS}{sections}</html>\n"
    )


def _section(measure: str, figures: Sequence[Figure]) -> str:
    least = min(0.0, *(figure.low for figure in figures))
    most = max(1.0, *(figure.high for figure in figures))
    rows = "".join(_row(figure, least, most) for figure in figures)
    return (
        f'<h2>{escape(measure)}</h2>\n<p class="note">{escape(MEANINGS[measure])}; '
        f"the plots go from {least:.1f} to {most:.1f}</p>\n"
        "<table>\n<tr><th>group</th><th>value</th><th>95 % interval</th><th>p</th><th>n</th>"
        f"<th></th><th>reading</th></tr>\n{rows}</table>\n"
    )


def _row(figure: Figure, least: float, most: float) -> str:
    p = "" if figure.p is None else f"{figure.p:.4f}"
    numbers = (f"{figure.value:.3f}", f"{figure.low:.3f} to {figure.high:.3f}", p, figure.count)
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return (
        f"<tr><td>{escape(figure.group)}</td>{cells}<td>{_plot(figure, least, most)}</td>"
        f"<td>{escape(figure.reading)}</td></tr>\n"
    )


def _plot(figure: Figure, least: float, most: float) -> str:
    def x(value: float) -> str:
        return f"{6 + (value - least) / (most - least) * (_WIDTH - 12):.1f}"

    middle = _HEIGHT // 2
    neutral = ""
    if figure.neutral is not None:
        at = x(figure.neutral)
        neutral = f'<line x1="{at}" x2="{at}" y1="0" y2="{_HEIGHT}" stroke="#aaa"/>'
    label = f"{figure.value:.3f}, {figure.low:.3f} to {figure.high:.3f}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{neutral}'
        f'<line x1="{x(figure.low)}" x2="{x(figure.high)}" y1="{middle}" y2="{middle}" '
        f'stroke="#2458a6" stroke-width="2"/>'
        f'<circle cx="{x(figure.value)}" cy="{middle}" r="4" fill="#2458a6"/></svg>'
    )
