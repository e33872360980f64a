"""Options that several commands have."""

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from cloze.model_store.locations import DEFAULT_ROOT

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
"""The settings of the command line: how it shows help."""


def complete_bundle(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the bundles of the store whose names begin like a word; a path is completed as one."""
    if incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="dir")]
    from cloze.model_store.store import Store, StoreError

    root = context.params.get("model_store") or os.environ.get("CLOZE_MODEL_STORE") or DEFAULT_ROOT
    try:
        references = Store(Path(root)).references()
    except StoreError:
        return []
    names = dict.fromkeys(each.partition("@")[0] for each in references)
    return [CompletionItem(name) for name in (*names, *references) if name.startswith(incomplete)]


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
