"""Options that several commands have."""

from pathlib import Path

import click

from cloze.model_store.locations import DEFAULT_ROOT

store_option = click.option(
    "--model-store",
    type=click.Path(file_okay=False, readable=False, path_type=Path),
    default=DEFAULT_ROOT,
    envvar="CLOZE_MODEL_STORE",
    show_envvar=True,
    help="Folder that contains the bundles.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)
