"""``cloze train evaluate``: measures a checkpoint or a bundle."""

import tempfile
from pathlib import Path

import click

from cloze.failing import fail
from cloze.model_store.manifest import Precision
from cloze.model_store.store import Store
from cloze.options import json_option, store_option
from cloze.tables import print_rows, report
from cloze.train_options import (
    corpus_option,
    device_options,
    files_option,
    one_line_errors,
    open_device,
    precision_option,
)


@click.command()
@click.argument("source")
@corpus_option
@files_option("pairs", "Scored pairs, CSV")
@files_option("questions", "SQuAD format")
@files_option("labelled", "Texts with labels")
@files_option("tagged", "Words with tags")
@click.option(
    "--label-set",
    metavar="NAME",
    help="A label set of the model. [default: the first with all labels of the file]",
    show_default=False,
)
@files_option("sentences", "Sentences with one [MASK], a tab, and accepted words")
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of titles that training held out.",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=1000,
    help="Number of masked sequences, and of pairs of texts.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=8),
    default=128,
    help="Tokens per sequence, limited by the model.",
)
@precision_option
@json_option
@store_option
@device_options
@one_line_errors
def evaluate(
    source: str,
    corpus: tuple[Path, ...],
    pairs: tuple[Path, ...],
    questions: tuple[Path, ...],
    labelled: tuple[Path, ...],
    tagged: tuple[Path, ...],
    label_set: str | None,
    sentences: tuple[Path, ...],
    held_out: float,
    sequences: int,
    tokens: int,
    precision: str,
    as_json: bool,
    model_store: Path,
    device: str,
    threads: int | None,
) -> None:
    """Measure SOURCE, a checkpoint or bundle:NAME, on text, pairs, questions and sentences.

    The figures depend on the tasks of SOURCE and on the given data: see docs/train.md.

    \b
    Example:
      cloze train evaluate my-run/checkpoint --corpus my.txt --held-out 0.01
    """
    from cloze.export.measure.evaluate import EvaluationData, open_subject
    from cloze.export.measure.evaluate import evaluate as measure

    opened_device = open_device(device, threads)
    subject = open_subject(source, Store(model_store), opened_device, Precision(precision))
    data = EvaluationData(
        list(corpus),
        list(pairs),
        list(questions),
        held_out,
        sentences,
        sequences,
        tokens,
        labelled=labelled,
        tagged=tagged,
        label_set=label_set,
    )
    with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
        figures = measure(subject, data, Path(folder), report)
    if not figures:
        fail(
            "there is nothing to measure: "
            "give --corpus, --pairs, --questions, --labelled or --tagged that its tasks can answer"
        )
    if as_json:
        print_rows([figures], as_json=True)
    else:
        rows = [{"figure": name, "value": value} for name, value in figures.items()]
        print_rows(rows, right=("value",))
