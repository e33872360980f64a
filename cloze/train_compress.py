"""``cloze train prune`` and ``factorise``: smaller models, and what they cost."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.train_options import corpus_option, required, run_command

if TYPE_CHECKING:
    from cloze.export.train.recipe import FactoriseRecipe, PruneRecipe
    from cloze.export.train.run_options import RunOptions


@click.command()
@click.argument("source")
@corpus_option
@click.option(
    "--share",
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of the heads and neurons to keep, instead of the recipe's.",
)
@run_command("PruneRecipe", "prune")
def prune(
    recipe: "PruneRecipe",
    options: "RunOptions",
    source: str,
    corpus: tuple[Path, ...],
    share: float | None,
) -> Path:
    """Remove the least important heads and neurons of the checkpoint SOURCE.

    Then the smaller model learns from SOURCE. The run ends with the figures of the export's gate.

    \b
    Example:
      cloze train prune my-run/checkpoint --share 0.6 --corpus my.txt --out pruned-run
    """
    from cloze.export.train.compress import prune as run

    if share is not None:
        recipe = recipe.model_copy(update={"heads": share, "neurons": share})
    return run(source, required(corpus), recipe, options)


@click.command()
@click.argument("source")
@corpus_option
@click.option(
    "--rank", type=click.IntRange(min=2), help="Width of the embeddings, instead of the recipe's."
)
@run_command("FactoriseRecipe", "factorise")
def factorise(
    recipe: "FactoriseRecipe",
    options: "RunOptions",
    source: str,
    corpus: tuple[Path, ...],
    rank: int | None,
) -> Path:
    """Give the BERT checkpoint SOURCE word embeddings of a lower rank, as an ELECTRA.

    Then the smaller model learns from SOURCE. The run ends with the figures of the export's gate.

    \b
    Example:
      cloze train factorise my-run/checkpoint --rank 128 --corpus my.txt --out narrow-run
    """
    from cloze.export.train.compress import factorise as run

    if rank is not None:
        recipe = recipe.model_copy(update={"rank": rank})
    return run(source, required(corpus), recipe, options)
