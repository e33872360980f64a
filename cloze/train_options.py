"""The options that several commands of ``cloze train`` have, and what they prepare.

Training packages are imported inside the functions, because a serving installation lacks them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch

    from cloze.export.train.run_options import RunOptions

# Without existence checks: the code that opens a path reports errors, in one line.
FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path)

corpus_option = click.option(
    "--corpus",
    "corpus",
    multiple=True,
    type=FILE,
    help="Text: plain or .jsonl (text, title), also .xz; may be repeated.",
)
out_option = click.option(
    "--out",
    type=FOLDER,
    required=True,
    help="Folder of the run; after a stop, the same command continues the run.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), help="Seed instead of the recipe's seed."
)
device_option = click.option(
    "--device", default="auto", help="cpu, cuda, cuda:N, or auto: cuda if available."
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="CPU threads. [default: all cores]",
    show_default=False,
)


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


def held_out_option(
    default: float, use: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the option of the share of titles that a run held out."""
    return click.option(
        "--held-out",
        type=click.FloatRange(0, 1, min_open=True),
        default=default,
        show_default=True,
        help=f"Share of titles that training held out{use}.",
    )


def required(corpus: tuple[Path, ...]) -> list[Path]:
    """Return the files of text; raise if there is none."""
    from cloze.export.errors import TrainError

    if not corpus:
        raise TrainError("there is no text: name a file with --corpus")
    return list(corpus)


def run_options(
    run_dir: Path, device: str, threads: int | None, license_name: str | None
) -> "RunOptions":
    """Return the options of a run beside its recipe."""
    from cloze.export.train.run_options import RunOptions

    return RunOptions(run_dir, open_device(device, threads), print_event, license=license_name)


def open_device(name: str, threads: int | None) -> "torch.device":
    """Prepare the process for a run on the CPU, and open the device."""
    import torch

    from cloze.export.train import device as devices

    if threads:
        torch.set_num_threads(threads)
    devices.keep_freed_memory()
    return devices.open_device(name)


def print_event(line: str) -> None:
    """Print a line of progress."""
    click.echo(line, err=True)
