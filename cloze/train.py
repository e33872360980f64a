"""``cloze train``: parses arguments, calls `cloze.export.train`, reports each error as one line.

Training packages are imported inside the commands, because a serving installation lacks them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloze.failing import fail
from cloze.model_store.locations import DEFAULT_ROOT
from cloze.model_store.manifest import Precision
from cloze.model_store.store import Store
from cloze.options import json_option
from cloze.tables import print_rows
from cloze.train_errors import one_line_errors

if TYPE_CHECKING:
    import torch

    from cloze.export.train.run_options import RunOptions

# Without existence checks: the code that opens a path reports errors, in one line.
_FILE = click.Path(path_type=Path)
_FOLDER = click.Path(path_type=Path)

_corpus = click.option(
    "--corpus",
    "corpus",
    multiple=True,
    type=_FILE,
    help="Text: plain or .jsonl (text, title), also .xz; may be repeated.",
)
_out = click.option(
    "--out",
    type=_FOLDER,
    required=True,
    help="Folder of the run; after a stop, the same command continues the run.",
)
_seed = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed instead of the recipe's seed."
)
_device = click.option(
    "--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda if available."
)
_threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="CPU threads. [default: all cores]",
    show_default=False,
)


def _recipe(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--recipe",
        default=default,
        help="A TOML file, or the name of a recipe of the package.",
    )


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
@_corpus
@_recipe("vocabulary")
@click.option(
    "--size", type=click.IntRange(32, 1_000_000), help="Tokens instead of the recipe's size."
)
@click.option("--cased/--uncased", default=None, help="Instead of the recipe's case.")
@_out
@one_line_errors
def vocab(
    corpus: tuple[Path, ...], recipe: str, size: int | None, cased: bool | None, out: Path
) -> None:
    """Learn a WordPiece vocabulary; write tokenizer.json and vocab.txt."""
    from cloze.export.train.documents import read_documents
    from cloze.export.train.recipe import VocabularyRecipe, load_recipe
    from cloze.export.train.vocabulary import save_vocabulary, train_tokenizer

    settings = load_recipe(recipe, VocabularyRecipe).vocabulary
    size = size or settings.size
    files = _required(corpus)
    tokenizer = train_tokenizer(
        lambda: read_documents(files),
        size=size,
        lowercase=settings.lowercase if cased is None else not cased,
        min_frequency=settings.min_frequency,
    )
    save_vocabulary(tokenizer, out)
    click.echo(f"{size:,} tokens in {out}")


@train.command()
@_corpus
@_recipe("pretrain-5-minutes")
@click.option(
    "--vocab",
    "vocabulary",
    type=_FOLDER,
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
@_out
@_seed
@_device
@_threads
@one_line_errors
def pretrain(
    corpus: tuple[Path, ...],
    recipe: str,
    vocabulary: Path | None,
    source: str | None,
    embeddings_from: str | None,
    out: Path,
    seed: int | None,
    device: str,
    threads: int | None,
) -> None:
    """Train a BERT on text, by default with masked tokens and next sentences.

    \b
    Examples:
      cloze train pretrain --corpus my.txt --out my-run
      cloze export my-run/checkpoint --name my-bert
      cloze train pretrain --from ./my-bert --recipe pretrain-further --corpus b.txt --out further
    """
    from cloze.export.train.pretrain import pretrain as run
    from cloze.export.train.recipe import PretrainRecipe, load_recipe

    settings = load_recipe(recipe, PretrainRecipe, seed=seed)
    files, options = _required(corpus), _run_options(out, device, threads)
    starts = {"source": source, "embeddings_from": embeddings_from}
    _report_done(run(files, settings, options, vocabulary=vocabulary, **starts))


@train.command("finetune-qa")
@click.argument("source")
@click.option(
    "--questions",
    multiple=True,
    required=True,
    type=_FILE,
    help="SQuAD 1.1 or 2.0 format, also .xz; may be repeated.",
)
@_recipe("finetune-qa")
@_out
@_seed
@_device
@_threads
@one_line_errors
def finetune_qa(
    source: str,
    questions: tuple[Path, ...],
    recipe: str,
    out: Path,
    seed: int | None,
    device: str,
    threads: int | None,
) -> None:
    """Fine-tune the checkpoint SOURCE for question answering."""
    from cloze.export.train.questions import finetune_questions
    from cloze.export.train.recipe import QuestionsRecipe, load_recipe

    settings = load_recipe(recipe, QuestionsRecipe, seed=seed)
    options = _run_options(out, device, threads)
    _report_done(finetune_questions(source, list(questions), settings, options))


@train.command("average")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--out", type=_FOLDER, required=True, help="Folder of the new checkpoint.")
@one_line_errors
def average(sources: tuple[str, ...], out: Path) -> None:
    """Average the weights of the checkpoints SOURCE, fine-tuned from one checkpoint.

    The average of runs with different settings is often better than each of them.
    """
    from cloze.export.train.average import average as run

    click.echo(run(sources, out))


@train.command("calibrate-qa")
@click.argument("source")
@click.option(
    "--questions",
    multiple=True,
    required=True,
    type=_FILE,
    help="SQuAD 2.0 format, also .xz; may be repeated.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.08,
    show_default=True,
    help="Share of titles that training held out; only these are used.",
)
@click.option("--out", type=_FOLDER, required=True, help="Folder of the new checkpoint.")
@_device
@_threads
@one_line_errors
def calibrate_qa(
    source: str,
    questions: tuple[Path, ...],
    held_out: float,
    out: Path,
    device: str,
    threads: int | None,
) -> None:
    """Calibrate when the checkpoint SOURCE says that a question has no answer.

    The best threshold on the held-out questions becomes part of the weights.
    """
    from cloze.export.train.no_answer import calibrate

    done = calibrate(source, questions, held_out, out, _run_options(out, device, threads).device)
    click.echo(
        f"{out}: F1 {done.f1_before:.1f} before, {done.f1_after:.1f} after, {done.f1_across:.1f} "
        f"with the threshold of the other half; the threshold was {done.threshold:.2f}"
    )


@train.command("finetune-embed")
@click.argument("source")
@click.option(
    "--pairs",
    multiple=True,
    type=_FILE,
    help="CSV without header: sentence, sentence, score; also .xz; may be repeated.",
)
@click.option("--held-out-pairs", multiple=True, type=_FILE, help="Scored pairs to evaluate.")
@_corpus
@_recipe("finetune-embed")
@_out
@_seed
@_device
@_threads
@one_line_errors
def finetune_embed(
    source: str,
    pairs: tuple[Path, ...],
    held_out_pairs: tuple[Path, ...],
    corpus: tuple[Path, ...],
    recipe: str,
    out: Path,
    seed: int | None,
    device: str,
    threads: int | None,
) -> None:
    """Fine-tune the embeddings of the checkpoint SOURCE.

    The other heads of SOURCE are kept. With --corpus, training also keeps them accurate.
    """
    from cloze.export.train.recipe import EmbedRecipe, load_recipe
    from cloze.export.train.sentences import EmbeddingFiles, finetune_sentences

    settings = load_recipe(recipe, EmbedRecipe, seed=seed)
    files = EmbeddingFiles(list(pairs), list(held_out_pairs), list(corpus))
    options = _run_options(out, device, threads)
    _report_done(finetune_sentences(source, files, settings, options))


@train.command()
@click.argument("teacher")
@_corpus
@_recipe("distill")
@_out
@_seed
@_device
@_threads
@one_line_errors
def distill(
    teacher: str,
    corpus: tuple[Path, ...],
    recipe: str,
    out: Path,
    seed: int | None,
    device: str,
    threads: int | None,
) -> None:
    """Distil the BERT checkpoint TEACHER into a DistilBERT of half its layers."""
    from cloze.export.train.distill import distill as run
    from cloze.export.train.recipe import DistillRecipe, load_recipe

    settings = load_recipe(recipe, DistillRecipe, seed=seed)
    files, options = _required(corpus), _run_options(out, device, threads)
    _report_done(run(teacher, files, settings, options))


@train.command()
@click.argument("source")
@_corpus
@click.option("--pairs", multiple=True, type=_FILE, help="Scored pairs, CSV.")
@click.option("--questions", multiple=True, type=_FILE, help="SQuAD format.")
@click.option(
    "--stereotypes",
    type=_FILE,
    help="CrowS-Pairs: the share of pairs with a likelier stereotype; 0.5 is unbiased.",
)
@click.option(
    "--sentences",
    multiple=True,
    type=_FILE,
    help="Sentences with one [MASK], a tab, and accepted words.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
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
@click.option(
    "--precision",
    type=click.Choice([str(p) for p in Precision]),
    default=str(Precision.FP32),
    help="Precision of a bundle's graph.",
)
@json_option
@click.option(
    "--model-store",
    type=_FOLDER,
    default=DEFAULT_ROOT,
    envvar="CLOZE_MODEL_STORE",
    help="Model store of bundle:NAME.",
)
@_device
@_threads
@one_line_errors
def evaluate(
    source: str,
    corpus: tuple[Path, ...],
    pairs: tuple[Path, ...],
    questions: tuple[Path, ...],
    stereotypes: Path | None,
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

    The figures depend on the tasks of SOURCE and on the given data: fill-mask top-1, top-5 and
    perplexity (every chosen token is a [MASK]), next-sentence accuracy, Spearman's correlation on
    pairs, exact match and F1 on questions, and bias on CrowS-Pairs.
    """
    import tempfile

    from cloze.export.train.evaluate import EvaluationData, open_subject
    from cloze.export.train.evaluate import evaluate as measure

    opened_device = _open_device(device, threads)
    subject = open_subject(source, Store(model_store), opened_device, Precision(precision))
    data = EvaluationData(
        list(corpus),
        list(pairs),
        list(questions),
        held_out,
        stereotypes,
        sentences,
        sequences,
        tokens,
    )
    with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
        figures = measure(subject, data, Path(folder), _print_event)
    if not figures:
        fail(
            "there is nothing to measure: "
            "give --corpus, --pairs or --questions that its tasks can answer"
        )
    if as_json:
        print_rows([figures], as_json=True)
    else:
        rows = [{"figure": name, "value": value} for name, value in figures.items()]
        print_rows(rows, right=("value",))


def _required(corpus: tuple[Path, ...]) -> list[Path]:
    from cloze.export.train.errors import TrainError

    if not corpus:
        raise TrainError("there is no text: name a file with --corpus")
    return list(corpus)


def _run_options(run_dir: Path, device: str, threads: int | None) -> "RunOptions":
    from cloze.export.train.run_options import RunOptions

    return RunOptions(run_dir, _open_device(device, threads), _print_event)


def _open_device(name: str, threads: int | None) -> "torch.device":
    """Prepare the process for a run on the CPU, and open the device."""
    import torch

    from cloze.export.train.device import keep_freed_memory, open_device

    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()
    return open_device(name)


def _print_event(line: str) -> None:
    click.echo(line, err=True)


def _report_done(checkpoint: Path) -> None:
    click.echo(f"{checkpoint}; curves in {checkpoint.parent / 'curves.png'}")
