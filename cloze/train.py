"""``cloze train``: parses arguments, calls `cloze.export.train`, reports each error as one line.

Training packages are imported inside the commands, because a serving installation lacks them.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.train_evaluate import evaluate
from cloze.train_options import (
    FILE,
    FOLDER,
    corpus_option,
    device_options,
    files_option,
    license_option,
    lora_option,
    one_line_errors,
    open_device,
    required,
    run_command,
)

if TYPE_CHECKING:
    from cloze.export.train.folder import Folder
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

_MEASURED = "Rows to measure on, instead of the recipe's share of the others"


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
@click.option("--size", type=click.IntRange(32, 1_000_000), default=12_000, help="Tokens.")
@click.option("--cased/--uncased", default=False, help="Keep capitals and accents.")
@click.option("--out", type=FOLDER, required=True, help="Folder of the vocabulary.")
@one_line_errors
def vocab(corpus: tuple[Path, ...], size: int, cased: bool, out: Path) -> None:
    """Learn a WordPiece vocabulary; write its tokenizer as transformers reads it.

    \b
    Example:
      cloze train vocab --corpus my.txt --size 8000 --out vocabulary
    """
    from cloze.export.measure.documents import read_documents
    from cloze.export.train.vocabulary import save_vocabulary, train_tokenizer

    files = required(corpus)
    tokenizer = train_tokenizer(lambda: read_documents(files), size=size, lowercase=not cased)
    save_vocabulary(tokenizer, out)
    click.echo(f"{size:,} tokens in {out}")


@train.command()
@corpus_option
@click.option(
    "--vocab",
    "vocabulary",
    metavar="FOLDER",
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
    source: "Folder | None",
    embeddings_from: "Folder | None",
    vocabulary: "Folder | None",
) -> Path:
    """Train a BERT on text, by default with masked tokens and next sentences.

    \b
    Examples:
      cloze train pretrain --corpus my.txt --out my-run
      cloze export my-run/checkpoint --name my-bert
      cloze train pretrain --from ./my-bert --recipe pretrain-further --corpus b.txt --out further
    """
    from cloze.export.train.pretrain import pretrain as run

    return run(
        required(corpus),
        recipe,
        options,
        source=source,
        embeddings_from=embeddings_from,
        vocabulary=vocabulary,
    )


@train.command("finetune-qa")
@click.argument("source")
@files_option("questions", "SQuAD 1.1 or 2.0 format, also .xz", required=True)
@lora_option
@run_command("QuestionsRecipe", "finetune-qa")
def finetune_qa(
    recipe: "QuestionsRecipe", options: "RunOptions", source: "Folder", questions: tuple[Path, ...]
) -> Path:
    """Fine-tune the checkpoint SOURCE for question answering.

    \b
    Example:
      cloze train finetune-qa my-run/checkpoint --questions squad.json --out qa-run
    """
    from cloze.export.train.finetune import finetune

    return finetune(source, questions, (), recipe, options)


@train.command("finetune-classify")
@click.argument("source")
@files_option(
    "labelled",
    "JSON Lines: text, text_pair, label or labels; or CSV or TSV with a header; also .xz",
    required=True,
)
@files_option("held-out-labelled", _MEASURED)
@lora_option
@run_command("LabelsRecipe", "finetune-classify")
def finetune_classify(
    recipe: "LabelsRecipe",
    options: "RunOptions",
    source: "Folder",
    labelled: tuple[Path, ...],
    held_out_labelled: tuple[Path, ...],
) -> Path:
    """Fine-tune the checkpoint SOURCE for labels of texts or pairs.

    A label that is a string is one of several classes; a list of labels is any number of them; a
    number is predicted (regression). The column label of a table has classes, and score numbers.

    \b
    Example:
      cloze train finetune-classify my-run/checkpoint --labelled reviews.jsonl --out labels-run
    """
    from cloze.export.train.finetune import finetune

    return finetune(source, labelled, held_out_labelled, recipe, options)


@train.command("finetune-tokens")
@click.argument("source")
@files_option("tagged", "JSON Lines: tokens, tags (IOB2); or columns: word, tag", required=True)
@files_option("held-out-tagged", _MEASURED)
@lora_option
@run_command("TagsRecipe", "finetune-tokens")
def finetune_tokens(
    recipe: "TagsRecipe",
    options: "RunOptions",
    source: "Folder",
    tagged: tuple[Path, ...],
    held_out_tagged: tuple[Path, ...],
) -> Path:
    """Fine-tune the checkpoint SOURCE for tags of words, such as entities.

    \b
    Example:
      cloze train finetune-tokens my-run/checkpoint --tagged names.conll --out names-run
    """
    from cloze.export.train.finetune import finetune

    return finetune(source, tagged, held_out_tagged, recipe, options)


@train.command("finetune-tasks")
@click.option("--from", "source", metavar="SOURCE", required=True, help="A checkpoint.")
@click.option(
    "--data", type=FOLDER, required=True, help="Folder of the files that the recipe names."
)
@run_command("TasksRecipe", None)
def finetune_tasks(
    recipe: "TasksRecipe", options: "RunOptions", source: "Folder", data: Path
) -> Path:
    """Fine-tune one encoder for all tasks of TASKS.toml at once.

    Each batch is of one task, in proportion to the square root of the size of its set.

    \b
    Example:
      cloze train finetune-tasks tasks.toml --from my-run/checkpoint --data data --out tasks-run
    """
    from cloze.export.train.finetune import finetune_tasks as run

    return run(source, data, recipe, options)


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
@files_option("pairs", "CSV without header: sentence, sentence, score; also .xz")
@files_option("held-out-pairs", "Scored pairs to evaluate")
@corpus_option
@lora_option
@run_command("EmbedRecipe", "finetune-embed")
def finetune_embed(
    recipe: "EmbedRecipe",
    options: "RunOptions",
    source: "Folder",
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
    from cloze.export.train.embedding import finetune_embedding

    return finetune_embedding(
        source, recipe, options, pairs=pairs, held_out_pairs=held_out_pairs, text=corpus
    )


@train.command()
@click.argument("source", metavar="TEACHER")
@corpus_option
@run_command("DistillRecipe", "distill")
def distill(
    recipe: "DistillRecipe", options: "RunOptions", source: "Folder", corpus: tuple[Path, ...]
) -> Path:
    """Distil the BERT checkpoint TEACHER into a DistilBERT of half its layers.

    \b
    Example:
      cloze train distill my-run/checkpoint --corpus my.txt --out student-run
    """
    from cloze.export.train.distill import distill as run

    return run(source, required(corpus), recipe, options)


_word_pairs = click.option(
    "--word-pairs",
    type=FILE,
    help="Two words per line with a tab between them. [default: the package's, of men and women]",
)


@train.command()
@click.argument("source")
@corpus_option
@_word_pairs
@run_command("PretrainRecipe", "pretrain-further")
def debias(
    recipe: "PretrainRecipe",
    options: "RunOptions",
    source: "Folder",
    corpus: tuple[Path, ...],
    word_pairs: Path | None,
) -> Path:
    """Train the checkpoint SOURCE further on text and a copy of it with words exchanged.

    Words such as "he" and "she" change places in the copy, so that the model learns both sentences.
    `cloze audit` of both checkpoints measures what changed.

    \b
    Example:
      cloze train debias my-run/checkpoint --corpus my.txt --out debiased
    """
    from cloze.export.train.pretrain import pretrain
    from cloze.export.train.word_pairs import read_word_pairs, write_counterfactuals

    augmented = options.run_dir / "counterfactuals.jsonl"
    copies = write_counterfactuals(required(corpus), read_word_pairs(word_pairs), augmented)
    options.report(f"{copies:,} documents have a counterfactual copy")
    return pretrain([augmented], recipe, options, source=source)


@train.command("debias-embed")
@click.argument("source")
@corpus_option
@_word_pairs
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
    dimensions: int,
    out: Path,
    device: str,
    threads: int | None,
) -> None:
    """Remove from the embeddings of the checkpoint SOURCE what tells the words of pairs apart.

    The directions come from the sentences of the text that have such words. The new checkpoint has
    a dense layer more, and only embeddings. `cloze audit` of both measures what changed.

    \b
    Example:
      cloze train debias-embed my-run/checkpoint --corpus my.txt --out debiased
    """
    from cloze.export.train.debias import project
    from cloze.export.train.word_pairs import read_word_pairs

    opened = open_device(device, threads)
    project(source, required(corpus), read_word_pairs(word_pairs), dimensions, out, opened)
    click.echo(out)


train.add_command(evaluate)
