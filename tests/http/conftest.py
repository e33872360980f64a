"""Fixtures of the tests over HTTP: servers of `tiny_store` that all modules share."""

from collections.abc import Callable

import pytest

from tests.support.serving import Server

Servers = Callable[[tuple[str, ...]], Server]


@pytest.fixture(scope="module")
def server(servers: Servers) -> Server:
    """Return a server of one process."""
    return servers(())


@pytest.fixture(scope="module")
def front_ends(servers: Servers) -> Server:
    """Return a server with two front ends."""
    return servers(("--frontends", "2"))
