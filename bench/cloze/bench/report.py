"""Formats a result as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

from cloze.bench.result import COMPARED, ONE_LENGTH, Cell, LoadKind, Result

_COLUMNS = {
    "texts/s": "texts_per_s",
    "p50 ms": "p50",
    "p90 ms": "p90",
    "p99 ms": "p99",
    "p99.9 ms": "p99.9",
    "CPU ms": "cpu_ms",
    "client ms": "client_cpu_ms",
    "memory MB": "rss_mb",
    "each page once": "pss_mb",
}


def table(result: Result) -> str:
    """Format the machine, the starts, the engines, and one row per subject and load."""
    lines = [*_heading(result), *_starts(result), *_one_length(result), *_compared(result)]
    if result.turns:
        lines += [*_turns(result), *_ratios(result), *_parts(result)]
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(columns: Sequence[str]) -> list[str]:
    return [_row(columns), "|---" * len(columns) + "|"]


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _heading(result: Result) -> list[str]:
    return [
        f"# {result.model}",
        "",
        f"    {result.command}",
        "",
        *(f"- {name}: {value}" for name, value in result.machine.items()),
        *(f"- {name}: {_listed(versions)}" for name, versions in result.versions.items()),
        *(f"- {note}" for note in result.notes),
        f"- texts: {_listed(result.texts)}",
        f"- date: {result.date}",
        "",
    ]


def _starts(result: Result) -> list[str]:
    if not result.starts:
        return []
    rows = [
        f"| {start.subject} | {start.ready_s:.2f} s | {start.rss_mb:.0f} MB |"
        for start in result.starts
    ]
    return ["| | start to ready | memory then |", "|---|---|---|", *rows, ""]


def _turns(result: Result) -> list[str]:
    """Return one row per load and subject, medians over turns."""
    turns = max(turn.turn for turn in result.turns) + 1
    stolen = [f"{turn.stolen:.0%}" for turn in sorted(result.turns, key=lambda turn: turn.stolen)]
    lines = [
        f"Medians of {turns} turn{'s' * (turns != 1)}; all subjects in turn, those of a load on "
        "the same texts. "
        "CPU ms is the processor time of the server per request, client ms that of the load "
        "generator, which shares the cores. Other guests of the host took "
        f"{stolen[0]} to {stolen[-1]} of the processor time of a load.",
        "",
        *_header(["load", "subject", *_COLUMNS, "failed"]),
    ]
    for load in result.loads():
        for subject in result.subjects():
            if measured := result.of(subject, load):
                medians = [result.median(subject, load, name) for name in _COLUMNS.values()]
                failed = sum(sum(turn.failed.values()) for turn in measured)
                lines.append(_row([load.name, subject, *map(_figure, medians), str(failed or "")]))
    return lines


def _one_length(result: Result) -> list[str]:
    """Return one table per engine: a row per sequence length, a column per batch size."""
    grid = [cell for cell in result.cells if cell.group == ONE_LENGTH]
    lines: list[str] = []
    for subject in dict.fromkeys(cell.subject for cell in grid):
        cells = {(c.lengths, c.batch_tokens): c for c in grid if c.subject == subject}
        batches = sorted({tokens for _, tokens in cells})
        lengths = sorted({length for length, _ in cells}, key=int)
        lines += [
            f"{subject}, thousand tokens per second (share of the peak); "
            "one row per sequence length, one column per number of tokens in a batch:",
            "",
            *_header(["tokens", *(f"{tokens:,}" for tokens in batches)]),
        ]
        for length in lengths:
            row = [cells.get((length, tokens)) for tokens in batches]
            lines.append(_row([length, *map(_speed, row)]))
        lines.append("")
    return lines


def _speed(cell: Cell | None) -> str:
    return f"{_kilo(cell.tokens_per_s)} ({cell.of_peak:.0%})" if cell else ""


def _compared(result: Result) -> list[str]:
    """Return the subjects on the same batches, each beside the engine of the same size."""
    cells = [cell for cell in result.cells if cell.group == COMPARED]
    if not cells:
        return []
    by_subject = {(cell.subject, cell.lengths): cell for cell in cells}
    lines = [
        "The same sequences; padding is not counted:",
        "",
        "| | tokens | per batch | thousand tokens/s | sequences/s | of the peak | engine over it |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in sorted(cells, key=lambda cell: (cell.engine, cell.lengths)):
        engine = by_subject.get((cell.engine, cell.lengths))
        is_other = engine is not None and engine is not cell
        ratio = f"{engine.tokens_per_s / cell.tokens_per_s:.2f}" if engine and is_other else ""
        batches = [cell.subject, cell.lengths, f"{cell.batch_tokens:,}"]
        speed = [_kilo(cell.tokens_per_s), f"{cell.sequences_per_s:,.0f}", f"{cell.of_peak:.0%}"]
        lines.append(_row([*batches, *speed, ratio]))
    return [*lines, ""]


def _kilo(number: float) -> str:
    return f"{number / 1000:,.0f}" if number >= 1e5 else f"{number / 1000:.1f}"


def _ratios(result: Result) -> list[str]:
    """Return the rate of each of our servers over the rates of its engine and of the peers."""
    engines = result.engines()
    servers = [subject for subject, engine in engines.items() if engine not in ("", subject)]
    peers = [subject for subject, engine in engines.items() if not engine]
    rows = [
        _row([load.name, server, other, f"{ours / theirs:.2f}"])
        for load in result.loads()
        if load.kind is LoadKind.CLOSED
        for server in servers
        for other in (engines[server], *peers)
        if (ours := result.median(server, load, "texts_per_s"))
        and (theirs := result.median(other, load, "texts_per_s"))
    ]
    if not rows:
        return []
    title = (
        "Texts per second of one over those of the other. The engine alone has no load generator "
        "beside it:"
    )
    return ["", title, "", *_header(["load", "one", "other", "ratio"]), *rows]


def _parts(result: Result) -> list[str]:
    """Return the duration of each part of a request, for the subjects that report it."""
    rows = {
        (load, subject): parts
        for load in result.loads()
        for subject in result.subjects()
        if (parts := result.parts(subject, load))
    }
    if not rows:
        return []
    names = list(next(iter(rows.values())))
    return [
        "",
        "Where a request's time in the server goes, ms on average:",
        "",
        *_header(["load", "subject", *names]),
        *(
            _row([load.name, subject, *(_figure(parts[name]) for name in names)])
            for (load, subject), parts in rows.items()
        ),
    ]


def _figure(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
