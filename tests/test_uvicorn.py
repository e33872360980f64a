"""The internals of uvicorn that the service uses are still there, and uvicorn still calls ours."""

import ast
import asyncio
import inspect
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cloze.service.server import connection as server_protocol
from cloze.service.server import process as server_module
from cloze.service.server.uvicorn_internals import OVERRIDDEN, USED, FlowControl


def class_tree(module: Any, name: str) -> ast.ClassDef:
    tree = ast.parse(Path(module.__file__).read_text())
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)


def used_names(tree: ast.AST, values: Iterable[str]) -> set[str]:
    """Return the attributes that the code uses of an object that it knows by the given names."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in values
    }


def own_names(tree: ast.ClassDef) -> set[str]:
    """Return the methods, and the attributes that a class sets in its `__init__`."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    methods = {n.name: n for n in ast.walk(tree) if isinstance(n, functions)}
    assigned = {
        target.attr
        for node in ast.walk(methods["__init__"])
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        for target in [node]
    }
    return assigned | methods.keys()


async def internals() -> Mapping[str, object]:
    """Return uvicorn's objects, of a connection with a request."""
    config = uvicorn.Config(app, log_config=None)
    config.load()
    state = ServerState()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        ours.sendall(b"POST / HTTP/1.1\r\ncontent-length: 2\r\n\r\n1")
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_accepted_socket(
            lambda: HttpToolsProtocol(config, state, {}), theirs
        )
        while protocol.cycle is None:
            await asyncio.sleep(0)
        transport.abort()
    return {
        "protocol": protocol,
        "cycle": protocol.cycle,
        "flow": protocol.flow,
        "config": config,
        "state": state,
        "server": uvicorn.Server(config),
        "lifespan": LifespanOn(config),
    }


async def app(scope: object, receive: object, send: object) -> None:
    await asyncio.Future()


def test_the_list_of_what_is_used_is_complete() -> None:
    connection = class_tree(server_protocol, "ServerProtocol")
    flow = class_tree(server_protocol, "_Flow")
    server = class_tree(server_module, "_Server")
    used = {
        "protocol": used_names(connection, ["self", "super()"]) - own_names(connection)
        | used_names(flow, ["self._connection"]) - own_names(connection),
        "cycle": used_names(connection, ["cycle", "self.cycle"]),
        "flow": used_names(connection, ["self.flow"])
        | used_names(flow, ["self"]) - own_names(flow),
        "server": used_names(server, ["self", "super()"]) - own_names(server),
        "config": used_names(server, ["self.config", "config"]),
        "state": used_names(server, ["self.server_state"]),
        "lifespan": used_names(server, ["self.lifespan"]),
    }
    assert used == USED
    overridden = {
        "protocol": (connection, HttpToolsProtocol),
        "flow": (flow, FlowControl),
        "server": (server, uvicorn.Server),
    }
    ours = {
        part: {n for n in own_names(tree) - {"__init__"} if hasattr(of_uvicorn, n)}
        for part, (tree, of_uvicorn) in overridden.items()
    }
    by_libraries = {name for name in ours["protocol"] if hasattr(asyncio.Protocol, name)}
    by_parser = {name for name in ours["protocol"] if name.startswith("on_")}
    ours["protocol"] -= by_libraries | by_parser - {"on_response_complete"}
    assert ours == OVERRIDDEN


def test_no_other_module_imports_what_is_private() -> None:
    service = Path(server_module.__file__).parent
    importing = [
        file.name
        for file in service.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("uvicorn")
    ]
    assert set(importing) == {"uvicorn_internals.py"}


@pytest.fixture(scope="module")
def inside() -> Mapping[str, object]:
    return asyncio.run(internals())


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in USED for name in sorted(USED[part])]
)
def test_what_is_used_of_uvicorn_exists(part: str, name: str, inside: Mapping[str, object]) -> None:
    source = inspect.getsource(type(inside[part]))
    assert hasattr(inside[part], name) or f"self.{name} = " in source


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part in OVERRIDDEN for name in sorted(OVERRIDDEN[part])]
)
def test_uvicorn_calls_what_the_service_overrides(part: str, name: str) -> None:
    protocol = inspect.getsource(inspect.getmodule(HttpToolsProtocol) or HttpToolsProtocol)
    server = inspect.getsource(inspect.getmodule(uvicorn.Server) or uvicorn.Server)
    calls = {
        ("protocol", "on_response_complete"): "on_response=self.on_response_complete,",
        ("protocol", "shutdown"): "connection.shutdown()",
        ("server", "handle_exit"): "signal.signal(sig, self.handle_exit)",
    }
    assert calls.get((part, name), f".{name}(") in protocol + server
    assert "self.on_response()" in inspect.getsource(RequestResponseCycle)


def test_uvicorn_still_times_connections_and_drains_as_the_service_expects() -> None:
    """`ServerProtocol` sets its own time for idle connections, and `_Server` its own drain."""
    source = inspect.getsource(HttpToolsProtocol.on_response_complete)
    assert "self.timeout_keep_alive_task = " in source
    drain = inspect.getsource(uvicorn.Server.shutdown)
    assert "in list(self.server_state.connections)" in drain
    assert "connection.shutdown()" in drain
    assert "if not self.keep_alive and not has_connection_close" in inspect.getsource(
        RequestResponseCycle.send
    )
