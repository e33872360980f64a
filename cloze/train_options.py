"""What several commands of ``cloze train`` have: options, what they prepare, and one-line errors.

Training packages are imported inside the functions, because a serving installation lacks them.
"""

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from cloze.failing import fail
from cloze.model_store.installation import install_command
from cloze.model_store.manifest import Precision
from cloze.model_store.store import StoreError
from cloze.tables import report

if TYPE_CHECKING:
    import torch

Command = Callable[..., Any]
Option = Callable[[Command], Command]

# Without existence checks: the code that opens a path reports errors, in one line.
FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path)


def files_option(name: str, content: str, *, required: bool = False) -> Option:
    """Return an option of any number of files."""
    text = f"{content}; may be repeated."
    return click.option(f"--{name}", multiple=True, type=FILE, required=required, help=text)


corpus_option = files_option("corpus", "Text: plain or .jsonl (text, title), also .xz")


def _checked_license(_: click.Context, __: click.Parameter, name: str | None) -> str | None:
    if name is not None and re.fullmatch(r"[\w.+-]*\w", name) is None:
        raise click.BadParameter("a name such as apache-2.0 has letters, digits, '.', '+' and '-'")
    return name


license_option = click.option(
    "--license",
    "license_name",
    metavar="NAME",
    callback=_checked_license,
    help="Licence of the new model, for its card and its bundle, such as apache-2.0.  "
    "[default: that of the checkpoints it starts from, if they have one]",
    show_default=False,
)


lora_option = click.option(
    "--lora",
    type=click.IntRange(1, 1024),
    metavar="RANK",
    help="Learn low-rank matrices beside the frozen encoder, and write a PEFT adapter.",
)


precision_option = click.option(
    "--precision",
    type=click.Choice([str(p) for p in Precision]),
    default=str(Precision.FP32),
    help="Precision of a bundle's graph.",
)


def device_options(command: Command) -> Command:
    """Add the options of where a command computes."""
    threads = click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        help="CPU threads. [default: all cores]",
        show_default=False,
    )
    device = click.option(
        "--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda if available."
    )
    return device(threads(command))


_FOLDERS = frozenset({"source", "embeddings_from", "vocabulary"})
"""Arguments that name a checkpoint."""


def run_command(kind: str, default: str | None) -> Option:
    """Make a function a command that runs a recipe and prints where its checkpoint is.

    The function gets the recipe and the options of the run before the command's own arguments, of
    which those that name a checkpoint are opened.

    Args:
        kind: name of the recipe's type.
        default: name of the recipe that runs if the user names none; None: the user must.
    """

    def make(run: Callable[..., Path]) -> Command:
        @wraps(run)
        @one_line_errors
        def command(
            recipe: str,
            out: Path,
            seed: int | None,
            device: str,
            threads: int | None,
            license_name: str | None,
            **arguments: Any,
        ) -> None:
            from cloze.export.train import recipe as recipes

            settings = recipes.load_recipe(recipe, getattr(recipes, kind), seed=seed)
            _read_early(arguments)  # the imports that follow take seconds
            from cloze.export.train.device import is_main
            from cloze.export.train.folder import open_folder
            from cloze.export.train.run_dir import locked
            from cloze.export.train.run_options import RunOptions

            if "lora" in arguments:
                settings = settings.with_rank(arguments.pop("lora"))
            opened = open_device(device, threads)
            speak = report if is_main() else lambda _: None
            options = RunOptions(out, opened, speak, license=license_name)
            for name in sorted(_FOLDERS & arguments.keys()):
                if arguments[name]:
                    arguments[name] = open_folder(arguments[name])
            with locked(out):
                checkpoint = run(settings, options, **arguments)
            if is_main():
                click.echo(f"{checkpoint}; curves in {checkpoint.parent / 'curves.png'}")

        return _with_run_options(command, default)

    return make


def _read_early(arguments: Mapping[str, Any]) -> None:
    """Read the files of rows, and the first line of each other file, for the sake of the errors."""
    from cloze.export.measure import documents, labelled, squad

    for name, read in (
        ("labelled", labelled.read_labelled),
        ("held_out_labelled", labelled.read_labelled),
        ("tagged", labelled.read_tagged),
        ("held_out_tagged", labelled.read_tagged),
        ("questions", squad.read_questions),
    ):
        if files := arguments.get(name):
            read(files)
    for name in ("corpus", "pairs", "held_out_pairs"):
        for file in arguments.get(name, ()):
            next(documents.read_lines(file), None)


def _with_run_options(command: Command, default: str | None) -> Command:
    out = click.option(
        "--out",
        type=FOLDER,
        required=True,
        help="Folder of the run; after a stop, the same command continues the run.",
    )
    seed = click.option(
        "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed instead of the recipe's seed."
    )
    recipe = click.option(
        "--recipe", default=default, help="A TOML file, or the name of a recipe of the package."
    )
    if default is None:
        recipe = click.argument("recipe", metavar="TASKS.toml")
    return recipe(out(seed(device_options(license_option(command)))))


def required(corpus: tuple[Path, ...]) -> list[Path]:
    """Return the files of text; raise if there is none."""
    if not corpus:
        from cloze.export.errors import TrainError

        raise TrainError("there is no text: name a file with --corpus")
    return list(corpus)


def open_device(name: str, threads: int | None) -> "torch.device":
    """Prepare the process for a run on the CPU, and open the device."""
    import torch

    from cloze.export.train import device as devices
    from cloze.model_store.system import keep_freed_memory

    if threads:
        torch.set_num_threads(threads)
    keep_freed_memory()
    return devices.open_device(name)


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Turn each expected error of a command into one line and exit code 1."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        try:
            from cloze.export.errors import DataError, ExportError
        except ModuleNotFoundError as error:
            _fail_for_missing_module(error)
        try:
            with _sigterm_as_ctrl_c():
                command(**arguments)
        except (DataError, ExportError, StoreError) as error:
            fail(str(error))
        except ModuleNotFoundError as error:
            _fail_for_missing_module(error)
        except KeyboardInterrupt:
            fail(
                "interrupted; what is saved is kept, the same command goes on from there", code=130
            )
        except OSError as error:
            file = error.filename or arguments.get("out") or "a file"
            fail(f"{file}: {error.strerror or error}")
        except (MemoryError, RuntimeError) as error:
            # torch has no type for a failed allocation on the CPU.
            if isinstance(error, RuntimeError) and "allocate" not in str(error):
                raise
            fail(
                "there is not enough memory; "
                "fewer sequences per batch, fewer tokens or a smaller model need less"
            )

    return run


def _fail_for_missing_module(error: ModuleNotFoundError) -> NoReturn:
    fail(
        f"training needs {error.name}, which the serving install leaves out; "
        f"install it with: {install_command('train')}"
    )


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM outside the training loop, which has its own handler."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
