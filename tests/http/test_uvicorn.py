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
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cloze.service.server import connection as server_protocol
from cloze.service.server import process as server_module
from cloze.service.server.connection import FlowControl


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


def assigned_names(tree: ast.ClassDef) -> set[str]:
    """Return the attributes that a class sets in its `__init__`."""
    [init] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return {
        node.attr
        for node in ast.walk(init)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


def own_names(tree: ast.ClassDef) -> set[str]:
    """Return the methods of a class, and the attributes that it sets in its `__init__`."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return assigned_names(tree) | {n.name for n in ast.walk(tree) if isinstance(n, functions)}


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


CONNECTION = class_tree(server_protocol, "ServerProtocol")
FLOW = class_tree(server_protocol, "_Flow")
SERVER = class_tree(server_module, "_Server")


def used_of_uvicorn() -> Mapping[str, set[str]]:
    """Return the attributes that the service uses, by the object of uvicorn that has them."""
    of_uvicorn = class_tree(httptools_impl, "HttpToolsProtocol")
    return {
        "protocol": assigned_names(CONNECTION) & assigned_names(of_uvicorn)
        | used_names(CONNECTION, ["self", "super()"]) - own_names(CONNECTION)
        | used_names(FLOW, ["self._connection"]) - own_names(CONNECTION),
        "cycle": used_names(CONNECTION, ["cycle", "self.cycle"]),
        "flow": used_names(CONNECTION, ["self.flow"])
        | used_names(FLOW, ["self"]) - own_names(FLOW),
        "server": used_names(SERVER, ["self", "super()"]) - own_names(SERVER),
        "config": used_names(SERVER, ["self.config", "config"]),
        "state": used_names(SERVER, ["self.server_state"]),
        "lifespan": used_names(SERVER, ["self.lifespan"]),
    }


def overridden_of_uvicorn() -> Mapping[str, set[str]]:
    """Return the methods that the service overrides, without those of asyncio and the parser."""
    overridden = {
        "protocol": (CONNECTION, HttpToolsProtocol),
        "flow": (FLOW, FlowControl),
        "server": (SERVER, uvicorn.Server),
    }
    ours = {
        part: {n for n in own_names(tree) - {"__init__"} if hasattr(overridden_type, n)}
        for part, (tree, overridden_type) in overridden.items()
    }
    by_libraries = {name for name in ours["protocol"] if hasattr(asyncio.Protocol, name)}
    by_parser = {name for name in ours["protocol"] if name.startswith("on_")}
    ours["protocol"] -= by_libraries | by_parser - {"on_response_complete"}
    return ours


USED, OVERRIDDEN = used_of_uvicorn(), overridden_of_uvicorn()


def test_all_that_is_used_was_found() -> None:
    assert all(USED.values())
    assert all(OVERRIDDEN.values())
    assert {"cycle", "flow", "_unset_keepalive_if_required"} <= USED["protocol"]


def test_no_other_module_imports_what_is_private() -> None:
    service = Path(server_module.__file__).parent
    importing = [
        file.name
        for file in service.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("uvicorn")
    ]
    assert set(importing) == {"connection.py"}


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
        ("protocol", "timeout_keep_alive_handler"): "alive, self.timeout_keep_alive_handler",
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
