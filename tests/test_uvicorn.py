"""The internals of uvicorn that the service uses are still there, and uvicorn still calls ours."""

import ast
import asyncio
import inspect
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.lifespan.on import LifespanOn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cloze.service import server as server_module
from cloze.service.http import server_protocol
from cloze.service.http.server_protocol import ServerProtocol


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
    methods = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
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


def test_what_is_used_of_uvicorn_exists() -> None:
    connection = class_tree(server_protocol, "ServerProtocol")
    server = class_tree(server_module, "_Server")
    used = {
        "protocol": used_names(connection, ["self", "super()"]) - own_names(connection),
        "cycle": used_names(connection, ["cycle", "self.cycle"]),
        "flow": used_names(connection, ["self.flow"]),
        "server": used_names(server, ["self", "super()"]) - own_names(server),
        "config": used_names(server, ["self.config", "config"]),
        "state": used_names(server, ["self.server_state"]),
        "lifespan": used_names(server, ["self.lifespan"]),
    }
    assert {"parser", "transport", "_unset_keepalive_if_required"} <= used["protocol"]
    assert {"more_body", "response_complete", "disconnected"} <= used["cycle"]
    assert all(used.values())
    there = asyncio.run(internals())
    missing = {
        f"{part}.{name}"
        for part, names in used.items()
        for name in names
        if not hasattr(there[part], name)
        and f"self.{name} = " not in inspect.getsource(type(there[part]))
    }
    assert missing == set()


def test_uvicorn_calls_what_the_service_overrides() -> None:
    connection = class_tree(server_protocol, "ServerProtocol")
    overridden = {name for name in own_names(connection) if hasattr(HttpToolsProtocol, name)} - {
        "__init__"
    }
    assert {"_start_asgi_task", "on_response_complete", "shutdown"} <= overridden
    source = inspect.getsource(inspect.getmodule(HttpToolsProtocol) or HttpToolsProtocol)
    callers = source + inspect.getsource(uvicorn.Server)
    by_libraries = {"connection_made", "connection_lost", "data_received", "resume_writing"}
    by_libraries |= {name for name in overridden if name.startswith("on_")}
    for name in overridden - by_libraries:
        assert f".{name}(" in callers, name
    assert "on_response=self.on_response_complete" in source
    assert "self.on_response()" in inspect.getsource(RequestResponseCycle)
    assert issubclass(ServerProtocol, HttpToolsProtocol)


def test_uvicorn_still_times_connections_and_drains_as_the_service_expects() -> None:
    """`ServerProtocol` sets its own time for idle connections, and `_Server` its own drain."""
    source = inspect.getsource(HttpToolsProtocol.on_response_complete)
    assert "self.timeout_keep_alive_task = " in source
    drain = inspect.getsource(uvicorn.Server.shutdown)
    assert "in list(self.server_state.connections)" in drain
    assert "connection.shutdown()" in drain
    assert "self.config.encoded_headers" in inspect.getsource(uvicorn.Server.on_tick)
