"""``cloze fetch``: puts models into a model store before a server starts."""

from pathlib import Path

import click

from cloze.failing import fail
from cloze.model_sources import SourceError, bundles_to_serve, parse_address
from cloze.model_store.store import Store, StoreError
from cloze.options import store_option
from cloze.tables import report


@click.command()
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option(
    "--sha256",
    metavar="HEX",
    help="Expected hash of the only MODEL, an address; the same as #sha256=HEX after it.",
)
@store_option
def fetch(models: tuple[str, ...], sha256: str | None, model_store: Path) -> None:
    """Put models into the model store, so that a server needs neither a network nor torch.

    A MODEL is what `cloze serve --model` takes; without one, those of CLOZE_MODEL are fetched. It
    is a repository (hub:org/name@revision), the directory (./path) of a bundle or of a checkpoint,
    or the address of one: a folder of an object store (s3://, gs://, az://, or another one of
    fsspec), or an archive (.tar.gz, .tgz or .tar.zst) in such a store or by https. #sha256=HEX
    after an address is the expected hash: of the archive, or of the list that sha256sum prints of a
    folder's files, sorted by path. The command prints the hash of what it fetched. A commit as
    revision pins a repository.

    A model that was fetched before is not fetched again. A server that has the same MODEL serves
    the bundle from the store. An error leaves the store unchanged.

    \b
    Examples:
      cloze fetch hub:google-bert/bert-base-uncased@main
      cloze fetch s3://bucket/my-bert
      cloze fetch https://example.org/my-bert.tar.zst --sha256 HEX
    """
    from cloze.service.errors import StartupError
    from cloze.service.settings import load_settings

    try:
        if sha256 is not None:
            models = (_with_hash(models, sha256),)
        settings = load_settings({"model": models or None, "model_store": model_store})
        if not settings.model:
            fail("name a model to fetch, or set CLOZE_MODEL", code=2)
        store = Store(model_store)
        for reference in bundles_to_serve(settings, report):
            click.echo(store.open(reference).manifest.reference)
    except (SourceError, StartupError, StoreError) as error:
        fail(str(error))


def _with_hash(models: tuple[str, ...], sha256: str) -> str:
    """Return the only model with its expected hash."""
    if len(models) != 1 or "://" not in models[0]:
        fail(
            "--sha256 needs exactly one address; a commit pins a repository: hub:org/name@COMMIT",
            code=2,
        )
    address = parse_address(models[0])
    if address.sha256 is not None:
        fail("the address has a hash already; give it only once", code=2)
    return f"{address.url}#sha256={sha256}"
