"""``cloze train``: parses arguments, calls `export.train`, prints, and turns its errors into one line."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import click

from cloze.failing import fail
from model_store.locations import DEFAULT_ROOT
from model_store.manifest import Precision
from model_store.store import Store, StoreError

# What is wrong with one is said by who opens it, in one line.
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
    help="Folder of the run; the same command goes on with it after a stop.",
)
_seed = click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Instead of the recipe's.")
_device = click.option(
    "--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda where there is one."
)
_threads = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="Of the CPU. [default: all cores]",
    show_default=False,
)


def _recipe(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--recipe",
        default=default,
        help="A TOML file, or the name of a recipe that comes with cloze.",
    )


def _one_line(command: Callable[..., None]) -> Callable[..., None]:
    """What is wrong becomes one line and exit code 1."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            from export.errors import ExportError
            from export.train.errors import TrainError
        except ModuleNotFoundError as error:
            fail(
                f"training needs {error.name}, which the serving install leaves out; install cloze[cpu,train]"
            )
        try:
            with _sigterm_as_ctrl_c():
                command(**arguments)
        except (TrainError, ExportError, StoreError) as error:
            fail(str(error))
        except ModuleNotFoundError as error:
            fail(
                f"training needs {error.name}, which the serving install leaves out; install cloze[cpu,train]"
            )
        except KeyboardInterrupt:
            fail(
                "interrupted; what is saved is kept, the same command goes on from there", code=130
            )
        except OSError as error:
            fail(f"{error.filename or arguments.get('out') or 'a file'}: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "allocate" not in str(
                error
            ):  # of torch, which has no type for the CPU's
                raise
            fail(
                "there is not enough memory; fewer sequences a batch, fewer tokens or a smaller model need less"
            )

    return run


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Where a run does not wait for its step's end, SIGTERM ends it as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.group()
def train() -> None:
    """Make a model from text: vocabulary, pre-training, fine-tuning, distillation, evaluation.

    Every run is described by a small TOML recipe and lives in one folder, which holds its checkpoint, log.jsonl and
    curves.png. Stopped or killed, the same command goes on from the last checkpoint, with the same result.
    """
    # Before torch is imported. Threads that spin at barriers starve each other beside other work: docs/decisions/0010.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@train.command()
@_corpus
@_recipe("vocabulary")
@click.option("--size", type=click.IntRange(32, 1_000_000), help="Tokens, instead of the recipe's.")
@click.option("--cased/--uncased", default=None, help="Instead of the recipe's.")
@_out
@_one_line
def vocab(
    corpus: tuple[Path, ...], recipe: str, size: int | None, cased: bool | None, out: Path
) -> None:
    """Learn a WordPiece vocabulary; writes tokenizer.json and vocab.txt."""
    from export.train.corpus import read_documents
    from export.train.recipe import VocabularyRecipe, load_recipe
    from export.train.vocabulary import save_vocabulary, train_tokenizer

    chosen = load_recipe(recipe, VocabularyRecipe).vocabulary
    size, lowercase = size or chosen.size, chosen.lowercase if cased is None else not cased
    files = _required(corpus)
    save_vocabulary(
        train_tokenizer(
            lambda: read_documents(files),
            size=size,
            lowercase=lowercase,
            min_frequency=chosen.min_frequency,
        ),
        out,
    )
    click.echo(f"{size:,} tokens in {out}")


@train.command()
@_corpus
@_recipe("pretrain-5-minutes")
@click.option(
    "--vocab",
    "vocabulary",
    type=_FOLDER,
    help="Folder of `cloze train vocab`; learnt from the text if not given.",
)
@click.option(
    "--from",
    "source",
    metavar="CHECKPOINT",
    help="Go on from it, with its sizes and vocabulary, instead of from nothing.",
)
@_out
@_seed
@_device
@_threads
@_one_line
def pretrain(
    corpus: tuple[Path, ...],
    recipe: str,
    vocabulary: Path | None,
    source: str | None,
    out: Path,
    seed: int | None,
    device: str,
    threads: int | None,
) -> None:
    """Train a BERT from text: masked tokens and next sentences, or what the recipe says.

    \b
    Examples:
      cloze train pretrain --corpus my.txt --out my-run
      cloze export my-run/checkpoint --name my-bert
      cloze train pretrain --from ./my-bert --recipe pretrain-further --corpus more.txt --out further
    """
    from export.train.pretrain import pretrain as run
    from export.train.recipe import PretrainRecipe, load_recipe

    chosen = load_recipe(recipe, PretrainRecipe, seed=seed)
    _done(
        run(
            _required(corpus),
            chosen,
            out,
            source=source,
            vocabulary=vocabulary,
            **_how(device, threads),
        )
    )


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
@_one_line
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
    from export.train.questions import finetune_questions
    from export.train.recipe import QuestionsRecipe, load_recipe

    chosen = load_recipe(recipe, QuestionsRecipe, seed=seed)
    _done(finetune_questions(source, list(questions), chosen, out, **_how(device, threads)))


@train.command("finetune-embed")
@click.argument("source")
@click.option(
    "--pairs",
    multiple=True,
    type=_FILE,
    help="CSV without header: sentence, sentence, score; also .xz; may be repeated.",
)
@click.option("--held-out-pairs", multiple=True, type=_FILE, help="The same, to measure on.")
@_corpus
@_recipe("finetune-embed")
@_out
@_seed
@_device
@_threads
@_one_line
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
    """Tune the embeddings of the checkpoint SOURCE; its other heads are kept, and kept right if there is text."""
    from export.train.recipe import EmbedRecipe, load_recipe
    from export.train.sentences import finetune_sentences

    chosen = load_recipe(recipe, EmbedRecipe, seed=seed)
    data: dict[str, Any] = {
        "pairs": list(pairs),
        "held_out_pairs": list(held_out_pairs),
        "text": list(corpus),
    }
    _done(finetune_sentences(source, chosen, out, **data, **_how(device, threads)))


@train.command()
@click.argument("teacher")
@_corpus
@_recipe("distill")
@_out
@_seed
@_device
@_threads
@_one_line
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
    from export.train.distill import distill as run
    from export.train.recipe import DistillRecipe, load_recipe

    chosen = load_recipe(recipe, DistillRecipe, seed=seed)
    _done(run(teacher, _required(corpus), chosen, out, **_how(device, threads)))


@train.command()
@click.argument("source")
@_corpus
@click.option("--pairs", multiple=True, type=_FILE, help="Scored pairs, CSV.")
@click.option("--questions", multiple=True, type=_FILE, help="SQuAD format.")
@click.option(
    "--stereotypes",
    type=_FILE,
    help="CrowS-Pairs: the share of pairs whose stereotype is likelier; 0.5 is unbiased.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="Share of titles that training left out.",
)
@click.option(
    "--sequences",
    type=click.IntRange(min=1),
    default=1000,
    help="Masked sequences, and pairs of texts, to measure on.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=8),
    default=128,
    help="Of such a sequence, or what the model reads if less.",
)
@click.option(
    "--precision",
    type=click.Choice([str(p) for p in Precision]),
    default=str(Precision.FP32),
    help="Which graph of a bundle.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--model-store",
    type=_FOLDER,
    default=DEFAULT_ROOT,
    envvar="CLOZE_MODEL_STORE",
    help="Where bundle:NAME is.",
)
@_device
@_threads
@_one_line
def evaluate(
    source: str,
    corpus: tuple[Path, ...],
    pairs: tuple[Path, ...],
    questions: tuple[Path, ...],
    stereotypes: Path | None,
    held_out: float,
    sequences: int,
    tokens: int,
    precision: str,
    as_json: bool,
    model_store: Path,
    device: str,
    threads: int | None,
) -> None:
    """Measure SOURCE, a checkpoint or bundle:NAME, on text, pairs and questions.

    Fill-mask top-1, top-5 and perplexity (every chosen token a [MASK]), next-sentence accuracy, Spearman's correlation on
    pairs, EM and F1 on questions, and bias on CrowS-Pairs: those that its tasks and the data allow.
    """
    import tempfile

    from export.train.evaluate import Data, open_subject
    from export.train.evaluate import evaluate as measure

    how = _how(device, threads)
    subject = open_subject(source, Store(model_store), how["device"], Precision(precision))
    data = Data(
        list(corpus), list(pairs), list(questions), held_out, stereotypes, sequences, tokens
    )
    with tempfile.TemporaryDirectory(prefix="cloze-") as folder:
        figures = measure(subject, data, Path(folder), how["say"])
    if not figures:
        fail(
            "there is nothing to measure: give --corpus, --pairs or --questions that its tasks can answer"
        )
    click.echo(
        json.dumps(figures)
        if as_json
        else "\n".join(f"{name:<34} {value:8.4f}" for name, value in figures.items())
    )


def _required(corpus: tuple[Path, ...]) -> list[Path]:
    from export.train.errors import TrainError

    if not corpus:
        raise TrainError("there is no text: name a file with --corpus")
    return list(corpus)


def _how(device: str, threads: int | None) -> dict[str, Any]:
    """What every run is told: where to compute, how often to save, whom to tell."""
    import torch

    from export.train.loop import Schedule, open_device

    if threads:
        torch.set_num_threads(threads)
    return {
        "device": open_device(device),
        "schedule": Schedule(),
        "say": lambda line: click.echo(line, err=True),
    }


def _done(checkpoint: Path) -> None:
    click.echo(f"{checkpoint}; curves in {checkpoint.parent / 'curves.png'}")
