"""A server with few file descriptors, and more connections than it can have."""

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.support.faulty import embed
from tests.support.serving import running_server

FEW_FILES = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); "
    "sys.argv = ['cloze', 'serve', *sys.argv[1:]]; "
    "runpy.run_module('cloze', run_name='__main__')"
)


def test_few_files_mean_few_connections_and_nobody_is_shut_out(tiny_store: Path) -> None:
    """A server with 128 descriptors, and 300 connections that send nothing."""
    command = (sys.executable, "-c", FEW_FILES)
    with (
        running_server(tiny_store, "--model", "bert", command=command) as server,
        ExitStack() as stack,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        for _ in range(5):
            assert embed(server, "walk").status_code == 200
