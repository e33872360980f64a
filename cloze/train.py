"""``cloze train``: parses arguments, calls `cloze.export.train`, reports each error as one line.

Training packages are imported inside the commands, because a serving installation lacks them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.model_store.store import Store
from cloze.options import store_option
from cloze.train_debias import debias, debias_embed
from cloze.train_evaluate import evaluate
from cloze.train_options import (
    FILE,
    FOLDER,
    Command,
    corpus_option,
    license_option,
    lora_option,
    one_line_errors,
    questions_option,
    recipe_option,
    required,
    run_command,
)

if TYPE_CHECKING:
    from cloze.export.train.recipe import (
        DistillRecipe,
        EmbedRecipe,
        LabelsRecipe,
        PretrainRecipe,
        QuestionsRecipe,
        TagsRecipe,
        TasksRecipe,
    )
    from cloze.export.train.run_options import RunOptions


@click.group()
def train() -> None:
    """Train a model: vocabulary, pre-training, fine-tuning, distillation, evaluation.

    A TOML recipe describes a run. The folder of a run holds its checkpoint, log.jsonl and
    curves.png. After a stop or a kill, the same command continues from the last checkpoint, with
    the same result as an uninterrupted run.
    """
    # Set before torch is imported. Threads that spin at barriers delay each other if other
    # processes use the cores: docs/decisions/0010.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@train.command()
@corpus_option
@recipe_option("vocabulary")
@click.option(
    "--size", type=click.IntRange(32, 1_000_000), help="Tokens instead of the recipe's size."
)
@click.option("--cased/--uncased", default=None, help="Instead of the recipe's case.")
@click.option("--out", type=FOLDER, required=True, help="Folder of the vocabulary.")
@one_line_errors
def vocab(
    corpus: tuple[Path, ...], recipe: str, size: int | None, cased: bool | None, out: Path
) -> None:
    """Learn a WordPiece vocabulary; write its tokenizer as transformers reads it.

    \b
    Example:
      cloze train vocab --corpus my.txt --size 8000 --out vocabulary
    """
    from cloze.export.measure.documents import read_documents
    from cloze.export.train.recipe import VocabularyRecipe, load_recipe
    from cloze.export.train.vocabulary import save_vocabulary, train_tokenizer

    settings = load_recipe(recipe, VocabularyRecipe).vocabulary
    size = size or settings.size
    files = required(corpus)
    tokenizer = train_tokenizer(
        lambda: read_documents(files),
        size=size,
        lowercase=settings.lowercase if cased is None else not cased,
    )
    save_vocabulary(tokenizer, out)
    click.echo(f"{size:,} tokens in {out}")


@train.command()
@corpus_option
@click.option(
    "--vocab",
    "vocabulary",
    type=FOLDER,
    help="Folder of `cloze train vocab`. [default: learn one from the text]",
    show_default=False,
)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    help="Continue this checkpoint, with its sizes and vocabulary.",
)
@click.option(
    "--embeddings-from",
    metavar="CHECKPOINT",
    help="Whose embeddings keep_embeddings keeps. [default: those of --from]",
    show_default=False,
)
@run_command("PretrainRecipe", "pretrain-5-minutes")
def pretrain(
    recipe: "PretrainRecipe",
    options: "RunOptions",
    corpus: tuple[Path, ...],
    source: str | None,
    embeddings_from: str | None,
    vocabulary: Path | None,
) -> Path:
    """Train a BERT on text, by default with masked tokens and next sentences.

    \b
    Examples:
      cloze train pretrain --corpus my.txt --out my-run
      cloze export my-run/checkpoint --name my-bert
      cloze train pretrain --from ./my-bert --recipe pretrain-further --corpus b.txt --out further
    """
    from cloze.export.train.folder import open_folder
    from cloze.export.train.pretrain import pretrain as run

    given = {
        "source": source,
        "embeddings_from": embeddings_from,
        "vocabulary": str(vocabulary) if vocabulary else None,
    }
    starts = {name: open_folder(folder) for name, folder in given.items() if folder}
    return run(required(corpus), recipe, options, **starts)


@train.command("finetune-qa")
@click.argument("source")
@questions_option("SQuAD 1.1 or 2.0")
@lora_option
@run_command("QuestionsRecipe", "finetune-qa")
def finetune_qa(
    recipe: "QuestionsRecipe",
    options: "RunOptions",
    source: str,
    questions: tuple[Path, ...],
) -> Path:
    """Fine-tune the checkpoint SOURCE for question answering.

    \b
    Example:
      cloze train finetune-qa my-run/checkpoint --questions squad.json --out qa-run
    """
    from cloze.export.train.finetune import finetune
    from cloze.export.train.folder import open_folder

    return finetune(open_folder(source), questions, (), recipe, options)


labelled_option = click.option(
    "--labelled",
    multiple=True,
    required=True,
    type=FILE,
    help="JSON Lines: text, label or labels, perhaps text_pair; also .xz; may be repeated.",
)
tagged_option = click.option(
    "--tagged",
    multiple=True,
    required=True,
    type=FILE,
    help="JSON Lines: tokens and tags (IOB2); or columns: a word, its tag; may be repeated.",
)


def held_out_files(name: str) -> Callable[[Command], Command]:
    """Return the option of the files of rows that a run is measured on."""
    return click.option(
        f"--held-out-{name}",
        "held_out",
        multiple=True,
        type=FILE,
        help="Rows to measure on. [default: the recipe's share of the others]",
        show_default=False,
    )


@train.command("finetune-classify")
@click.argument("source")
@labelled_option
@held_out_files("labelled")
@store_option
@lora_option
@run_command("LabelsRecipe", "finetune-classify")
def finetune_classify(
    recipe: "LabelsRecipe",
    options: "RunOptions",
    source: str,
    labelled: tuple[Path, ...],
    held_out: tuple[Path, ...],
    model_store: Path,
) -> Path:
    """Fine-tune SOURCE, a checkpoint or bundle:NAME, for labels of texts or pairs.

    A label that is a string is one of several classes; a list of labels is any number of them; a
    number is predicted (regression).

    \b
    Example:
      cloze train finetune-classify my-run/checkpoint --labelled reviews.jsonl --out labels-run
    """
    from cloze.export.train.finetune import finetune
    from cloze.export.train.folder import open_folder

    return finetune(open_folder(source, Store(model_store)), labelled, held_out, recipe, options)


@train.command("finetune-tokens")
@click.argument("source")
@tagged_option
@held_out_files("tagged")
@store_option
@lora_option
@run_command("TagsRecipe", "finetune-tokens")
def finetune_tokens(
    recipe: "TagsRecipe",
    options: "RunOptions",
    source: str,
    tagged: tuple[Path, ...],
    held_out: tuple[Path, ...],
    model_store: Path,
) -> Path:
    """Fine-tune SOURCE, a checkpoint or bundle:NAME, for tags of words, such as entities.

    \b
    Example:
      cloze train finetune-tokens my-run/checkpoint --tagged names.conll --out names-run
    """
    from cloze.export.train.finetune import finetune
    from cloze.export.train.folder import open_folder

    return finetune(open_folder(source, Store(model_store)), tagged, held_out, recipe, options)


@train.command("finetune-tasks")
@click.option(
    "--from", "source", metavar="SOURCE", required=True, help="A checkpoint, or bundle:NAME."
)
@click.option(
    "--data", type=FOLDER, required=True, help="Folder of the files that the recipe names."
)
@store_option
@run_command("TasksRecipe", None)
def finetune_tasks(
    recipe: "TasksRecipe",
    options: "RunOptions",
    source: str,
    data: Path,
    model_store: Path,
) -> Path:
    """Fine-tune one encoder for all tasks of TASKS.toml at once.

    Each batch is of one task, in proportion to the square root of the size of its set.

    \b
    Example:
      cloze train finetune-tasks tasks.toml --from my-run/checkpoint --data data --out tasks-run
    """
    from cloze.export.train.folder import open_folder
    from cloze.export.train.joint import finetune_tasks as run

    return run(open_folder(source, Store(model_store)), data, recipe, options)


@train.command("average")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", type=FOLDER, required=True, help="Folder of the new checkpoint.")
@license_option
@one_line_errors
def average(sources: tuple[str, ...], out: Path, license_name: str | None) -> None:
    """Average the weights of the checkpoints SOURCE, fine-tuned from one checkpoint.

    The average of runs with different settings is often better than each of them.

    \b
    Example:
      cloze train average run-1/checkpoint run-2/checkpoint --out averaged
    """
    from cloze.export.train.average import average as run

    click.echo(run(sources, out, license_name))


@train.command("finetune-embed")
@click.argument("source")
@click.option(
    "--pairs",
    multiple=True,
    type=FILE,
    help="CSV without header: sentence, sentence, score; also .xz; may be repeated.",
)
@click.option("--held-out-pairs", multiple=True, type=FILE, help="Scored pairs to evaluate.")
@corpus_option
@lora_option
@run_command("EmbedRecipe", "finetune-embed")
def finetune_embed(
    recipe: "EmbedRecipe",
    options: "RunOptions",
    source: str,
    pairs: tuple[Path, ...],
    held_out_pairs: tuple[Path, ...],
    corpus: tuple[Path, ...],
) -> Path:
    """Fine-tune the embeddings of the checkpoint SOURCE, whatever its pooling.

    The heads of SOURCE for masked words and next sentences are kept. With --corpus, training also
    keeps them accurate.

    \b
    Example:
      cloze train finetune-embed my-run/checkpoint --pairs pairs.csv --out embed-run
    """
    from cloze.export.train.embedding import EmbeddingFiles, finetune_embedding
    from cloze.export.train.folder import open_folder

    files = EmbeddingFiles(list(pairs), list(held_out_pairs), list(corpus))
    return finetune_embedding(open_folder(source), files, recipe, options)


@train.command()
@click.argument("teacher")
@corpus_option
@click.option(
    "--from",
    "source",
    metavar="STUDENT",
    help="Continue this student instead of layers of TEACHER.",
)
@run_command("DistillRecipe", "distill")
def distill(
    recipe: "DistillRecipe",
    options: "RunOptions",
    teacher: str,
    corpus: tuple[Path, ...],
    source: str | None,
) -> Path:
    """Distil the BERT checkpoint TEACHER into a DistilBERT of half its layers.

    \b
    Example:
      cloze train distill my-run/checkpoint --corpus my.txt --out student-run
    """
    from cloze.export.train.distill import distill as run
    from cloze.export.train.folder import open_folder

    student = open_folder(source) if source else None
    return run(open_folder(teacher), required(corpus), recipe, options, student)


train.add_command(debias)
train.add_command(debias_embed)
train.add_command(evaluate)
