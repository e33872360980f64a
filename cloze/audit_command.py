"""``cloze audit``: measures social bias of a checkpoint or a bundle."""

from dataclasses import asdict
from pathlib import Path

import click

from cloze.failing import fail
from cloze.model_store.manifest import Precision
from cloze.model_store.store import Store
from cloze.options import json_option, store_option
from cloze.tables import print_rows, report
from cloze.train_options import FILE, device_options, one_line_errors, open_device, precision_option


@click.command()
@click.argument("source")
@click.option(
    "--crows-pairs", type=FILE, help="CrowS-Pairs, CSV. [default: fill-mask is not measured]"
)
@precision_option
@json_option
@store_option
@device_options
@one_line_errors
def audit(
    source: str,
    crows_pairs: Path | None,
    precision: str,
    as_json: bool,
    model_store: Path,
    device: str,
    threads: int | None,
) -> None:
    """Measure social bias of SOURCE, a checkpoint or bundle:NAME.

    A model that fills masks is asked which of two sentences of CrowS-Pairs is likelier; embeddings,
    which words are near to which (WEAT). docs/train.md says what each figure means. The figures are
    written into the card of a checkpoint's folder, which an export copies into its bundle.

    \b
    Examples:
      cloze audit bundle:cloze-bert
      cloze audit my-run/checkpoint --crows-pairs crows_pairs.csv
    """
    from cloze.export.measure.audit import audit as measure
    from cloze.export.measure.audit import write_to_card
    from cloze.export.measure.evaluate import open_subject

    opened_device = open_device(device, threads)
    subject = open_subject(source, Store(model_store), opened_device, Precision(precision))
    figures = measure(subject, crows_pairs)
    if not figures:
        heads = ", ".join(sorted(subject.heads)) or "none"
        fail(f"an audit needs embeddings, or fill-mask and --crows-pairs; the model has {heads}")
    rows = [asdict(each) for each in figures]
    print_rows(rows, as_json=as_json, right=("value", "low", "high", "count", "p"), headings=True)
    card = Path(source) / "README.md"
    if card.parent.is_dir():
        write_to_card(card, figures)
        report(f"the figures are in {card}")
