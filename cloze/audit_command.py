"""``cloze audit``: measures social bias of a checkpoint or a bundle."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.model_store.manifest import Precision
from cloze.model_store.store import Store
from cloze.options import json_option, store_option
from cloze.tables import Row, print_rows, report
from cloze.train_options import FILE, device_options, one_line_errors, open_device, precision_option

if TYPE_CHECKING:
    from cloze.export.measure.audit import Figure


@click.command()
@click.argument("source")
@click.option("--crows-pairs", type=FILE, help="CrowS-Pairs, CSV. [default: not measured]")
@click.option(
    "--stereoset",
    type=FILE,
    help="StereoSet's sentences, JSON lines with stereotype, anti_stereotype and unrelated, also "
    ".xz. [default: not measured]",
)
@click.option(
    "--minimal-pairs",
    type=FILE,
    help="JSON lines with stereotype, anti_stereotype and type, such as WinoBias, also .xz. "
    "[default: sentences of the package]",
)
@click.option(
    "--word-tests",
    type=FILE,
    help="JSON lines with the word lists of WEAT and SEAT. [default: those of the papers]",
)
@click.option(
    "--resamples", type=click.IntRange(min=100), default=1000, help="Drawings of the bootstrap."
)
@click.option("--seed", type=click.IntRange(min=0), default=1, help="Seed of the drawings.")
@precision_option
@click.option("--page", type=FILE, help="Write a page with plots to this file, HTML.")
@json_option
@store_option
@device_options
@one_line_errors
def audit(
    source: str,
    resamples: int,
    seed: int,
    precision: str,
    page: Path | None,
    as_json: bool,
    model_store: Path,
    device: str,
    threads: int | None,
    **files: Path | None,
) -> None:
    """Measure social bias of SOURCE, a checkpoint or bundle:NAME.

    A model that fills masks is asked which of two sentences is likelier; embeddings, which words
    are near to which. The package has data for both. docs/audit.md says what each figure means,
    and what it does not mean.

    \b
    Examples:
      cloze audit bundle:cloze-bert
      cloze audit my-run/checkpoint --crows-pairs crows_pairs.csv --page audit.html
    """
    from cloze.export.measure.audit import AuditData
    from cloze.export.measure.audit import audit as measure
    from cloze.export.measure.audit_page import audit_page
    from cloze.export.train.evaluate import open_subject

    given = {name: file for name, file in files.items() if file is not None}
    data = AuditData(**given, resamples=resamples, seed=seed)
    opened_device = open_device(device, threads)
    subject = open_subject(source, Store(model_store), opened_device, Precision(precision))
    figures = measure(subject, data)
    if as_json:
        print_rows([asdict(each) | {"reading": each.reading} for each in figures], as_json=True)
    else:
        print_figures(figures)
    if page is not None:
        page.write_text(audit_page(source, figures), encoding="utf-8")
        report(f"the page is {page}")


def print_figures(figures: Sequence["Figure"]) -> None:
    """Print a table, and then what each measure says."""
    from cloze.export.measure.audit import MEANINGS

    print_rows(
        [_row(figure) for figure in figures],
        right=("value", "95 % interval", "p", "n"),
        headings=True,
    )
    click.echo()
    for measure in dict.fromkeys(figure.measure for figure in figures):
        click.echo(f"{measure}: {MEANINGS[measure]}")
    click.echo(
        "The interval is by bootstrap over sentences or words. A share without preference is 0.5, "
        "an association 0."
    )


def _row(figure: "Figure") -> Row:
    return {
        "measure": figure.measure,
        "group": figure.group,
        "value": f"{figure.value:.3f}",
        "95 % interval": f"{figure.low:.3f} to {figure.high:.3f}",
        "p": "" if figure.p is None else f"{figure.p:.4f}",
        "n": str(figure.count),
        "reading": figure.reading,
    }
