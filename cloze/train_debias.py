"""``cloze train debias`` and ``debias-embed``: less bias, and what it costs."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.audit_command import crows_pairs_option
from cloze.model_store.store import Store
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
    import torch

    from cloze.export.measure.evaluate import EvaluationData
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
@crows_pairs_option
@run_command("PretrainRecipe", "pretrain-further")
def debias(
    recipe: "PretrainRecipe",
    options: "RunOptions",
    source: str,
    corpus: tuple[Path, ...],
    word_pairs: Path | None,
    pairs: tuple[Path, ...],
    crows_pairs: Path | None,
) -> Path:
    """Train the checkpoint SOURCE further on text and a copy of it with words exchanged.

    Words such as "he" and "she" change places in the copy, so that the model learns both sentences.
    A table shows the audit and the quality before and after.

    \b
    Example:
      cloze train debias my-run/checkpoint --corpus my.txt --out debiased
    """
    from cloze.export.measure.evaluate import EvaluationData
    from cloze.export.train.folder import open_folder
    from cloze.export.train.pretrain import pretrain
    from cloze.export.train.word_pairs import read_word_pairs, write_counterfactuals

    text, augmented = required(corpus), options.run_dir / "counterfactuals.jsonl"
    copies = write_counterfactuals(text, read_word_pairs(word_pairs), augmented)
    options.report(f"{copies:,} documents have a counterfactual copy")
    checkpoint = pretrain([augmented], recipe, options, source=open_folder(source))
    quality = EvaluationData(text, list(pairs), [], recipe.held_out)
    _compare((source, str(checkpoint)), quality, options.device, crows_pairs)
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
    a dense layer more, and only embeddings. A table shows the audit and the quality before and
    after.

    \b
    Example:
      cloze train debias-embed my-run/checkpoint --corpus my.txt --out debiased
    """
    from cloze.export.measure.evaluate import EvaluationData
    from cloze.export.train.debias import project
    from cloze.export.train.word_pairs import read_word_pairs

    opened = open_device(device, threads)
    project(source, required(corpus), read_word_pairs(word_pairs), dimensions, out, opened)
    _compare((source, str(out)), EvaluationData([], list(pairs), [], 1.0), opened)
    click.echo(out)


def _compare(
    sources: tuple[str, str],
    quality: "EvaluationData",
    device: "torch.device",
    crows_pairs: Path | None = None,
) -> None:
    """Print the audit and the quality of two checkpoints, and add both to the second one's card."""
    from cloze.export.measure.audit import audit
    from cloze.export.measure.evaluate import evaluate, open_subject

    measured = []
    for source in sources:
        subject = open_subject(source, Store(Path()), device)
        figures = {
            f"{each.measure}, {each.group}": each.value for each in audit(subject, crows_pairs)
        }
        with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
            measured.append(figures | evaluate(subject, quality, Path(folder), report))
    before, after = measured
    rows = [
        {"figure": name, "before": value, "after": after[name], "change": after[name] - value}
        for name, value in before.items()
        if name in after
    ]
    print_rows(rows, right=("before", "after", "change"), headings=True)
    lines = [f"| {row['figure']} | {row['before']:.4f} | {row['after']:.4f} |\n" for row in rows]
    with (Path(sources[1]) / "README.md").open("a", encoding="utf-8") as card:
        card.write("\n## Before and after\n\n| figure | before | after |\n|---|---|---|\n")
        card.writelines(lines)
