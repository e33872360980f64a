"""Formats a result as Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence

from cloze.bench.result import Cell, LoadKind, Result

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
    parts = (_heading, _starts, _cells, _turns, _ratios)
    return "\n".join(line for part in parts for line in part(result))


def markdown(
    columns: Sequence[str], rows: Iterable[Iterable[str]], title: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a title, a table and a blank line; nothing without rows."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    head = [*title, f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *lines, ""] if lines else []


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
    return markdown(
        ["", "start to ready", "memory then"],
        [(s.subject, f"{s.ready_s:.2f} s", f"{s.rss_mb:.0f} MB") for s in result.starts],
    )


def _turns(result: Result) -> list[str]:
    """Return one row per load and subject, medians over turns."""
    if not result.turns:
        return []
    turns = max(turn.turn for turn in result.turns) + 1
    stolen = sorted(turn.stolen for turn in result.turns)
    title = (
        f"Medians of {turns} turn{'s' * (turns != 1)}; all subjects in turn, those of a load on "
        "the same texts. "
        "CPU ms is the processor time of the server per request, client ms that of the load "
        "generator, which shares the cores. Other guests of the host took "
        f"{stolen[0]:.0%} to {stolen[-1]:.0%} of the processor time of a load."
    )
    rows = []
    for load in result.loads():
        for subject in result.subjects():
            if measured := result.of(subject, load):
                medians = [result.median(subject, load, name) for name in _COLUMNS.values()]
                failed = sum(sum(turn.failed.values()) for turn in measured)
                rows.append([load.name, subject, *map(_figure, medians), str(failed or "")])
    return markdown(["load", "subject", *_COLUMNS, "failed"], rows, [title, ""])


def _cells(result: Result) -> list[str]:
    """Return one row per engine and kind of batch, the subjects of one size beside each other."""
    engines = {(cell.subject, cell.lengths, cell.batch_tokens): cell for cell in result.cells}
    cells = sorted(result.cells, key=lambda c: (c.engine, c.lengths.zfill(9), c.batch_tokens))

    def row(cell: Cell) -> list[str]:
        engine = engines.get((cell.engine, cell.lengths, cell.batch_tokens))
        is_other = engine is not None and engine is not cell
        ratio = f"{engine.tokens_per_s / cell.tokens_per_s:.2f}" if engine and is_other else ""
        return [
            cell.subject,
            cell.lengths,
            f"{cell.batch_tokens:,}",
            _figure(cell.tokens_per_s / 1000),
            f"{cell.sequences_per_s:,.0f}",
            f"{cell.of_peak:.0%}",
            ratio,
        ]

    batches, speed = ["", "tokens", "per batch"], ["thousand tokens/s", "sequences/s"]
    return markdown(
        [*batches, *speed, "of the peak", "engine over it"],
        map(row, cells),
        ["Engines alone; padding is not counted:", ""],
    )


def _ratios(result: Result) -> list[str]:
    """Return the rate of each of our servers over the rates of its engine and of the peers."""
    engines = result.engines()
    servers = [subject for subject, engine in engines.items() if engine not in ("", subject)]
    peers = [subject for subject, engine in engines.items() if not engine]
    rows = [
        (load.name, server, other, f"{ours / theirs:.2f}")
        for load in result.loads()
        if load.kind is LoadKind.CLOSED
        for server in servers
        for other in (engines[server], *peers)
        if (ours := result.median(server, load, "texts_per_s"))
        and (theirs := result.median(other, load, "texts_per_s"))
    ]
    title = (
        "Texts per second of one over those of the other. The engine alone has no load generator "
        "beside it:"
    )
    return markdown(["load", "one", "other", "ratio"], rows, [title, ""])


def _figure(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
