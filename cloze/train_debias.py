"""``cloze train debias`` and ``debias-embed``: less bias, and what it costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.tables import print_rows, report
from cloze.train_options import (
    FILE,
    FOLDER,
    corpus_option,
    device_options,
    one_line_errors,
    open_device,
    required,
    run_command,
)

if TYPE_CHECKING:
    from cloze.export.train.debias import Change, DebiasFiles
    from cloze.export.train.recipe import PretrainRecipe
    from cloze.export.train.run_options import RunOptions

_word_pairs = click.option(
    "--word-pairs",
    type=FILE,
    help="Two words per line with a tab between them. [default: the package's, of men and women]",
)
_scored_pairs = click.option(
    "--pairs", multiple=True, type=FILE, help="Scored pairs to measure before and after, CSV."
)


@click.command()
@click.argument("source")
@corpus_option
@_word_pairs
@_scored_pairs
@run_command("PretrainRecipe", "pretrain-further")
def debias(
    recipe: "PretrainRecipe",
    options: "RunOptions",
    source: str,
    corpus: tuple[Path, ...],
    word_pairs: Path | None,
    pairs: tuple[Path, ...],
) -> Path:
    """Train the checkpoint SOURCE further on text and a copy of it with words exchanged.

    Words such as "he" and "she" change places in the copy, so that the model learns both sentences.
    A table shows the audit and the quality before and after.

    \b
    Example:
      cloze train debias my-run/checkpoint --corpus my.txt --out debiased
    """
    from cloze.export.train.debias import augment

    files = _files(corpus, word_pairs, pairs)
    checkpoint, changes = augment(source, files, recipe, options)
    _print_changes(changes)
    return checkpoint


@click.command("debias-embed")
@click.argument("source")
@corpus_option
@_word_pairs
@_scored_pairs
@click.option(
    "--dimensions", type=click.IntRange(min=1), default=1, help="Number of directions to remove."
)
@click.option("--out", type=FOLDER, required=True, help="Folder of the new checkpoint.")
@device_options
@one_line_errors
def debias_embed(
    source: str,
    corpus: tuple[Path, ...],
    word_pairs: Path | None,
    pairs: tuple[Path, ...],
    dimensions: int,
    out: Path,
    device: str,
    threads: int | None,
) -> None:
    """Remove from the embeddings of the checkpoint SOURCE what tells the words of pairs apart.

    The directions come from the sentences of the text that have such words. The new checkpoint has
    a dense layer more. A table shows the audit and the quality before and after.

    \b
    Example:
      cloze train debias-embed my-run/checkpoint --corpus my.txt --out debiased
    """
    from cloze.export.train.debias import project

    files = _files(corpus, word_pairs, pairs)
    opened = open_device(device, threads)
    _print_changes(project(source, files, dimensions, out, opened, report))
    click.echo(out)


def _files(
    corpus: tuple[Path, ...], word_pairs: Path | None, pairs: tuple[Path, ...]
) -> "DebiasFiles":
    from cloze.export.train.debias import DebiasFiles
    from cloze.export.train.word_pairs import GENDER_WORDS

    return DebiasFiles(required(corpus), word_pairs or GENDER_WORDS, list(pairs))


def _print_changes(changes: Sequence["Change"]) -> None:
    rows = [
        {
            "figure": change.figure,
            "before": change.before,
            "after": change.after,
            "change": change.after - change.before,
        }
        for change in changes
    ]
    print_rows(rows, right=("before", "after", "change"), headings=True)
