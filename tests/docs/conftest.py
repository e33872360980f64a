"""A server of the models that the documents ask."""

from collections.abc import Iterator

import pytest

from cloze.model_store.locations import DEFAULT_ROOT
from tests.support.serving import Server, running_server


@pytest.fixture(scope="package")
def default_server() -> Iterator[Server]:
    """As ``make serve``, but without bundles that a developer added, and in fp32 everywhere."""
    models = ",".join(sorted(folder.name for folder in DEFAULT_ROOT.glob("cloze-*")))
    with running_server(DEFAULT_ROOT, "--precision", "fp32", CLOZE_MODEL=models) as server:
        yield server
