"""What the service uses of uvicorn beyond its documentation.

No other module imports uvicorn's inner modules. `tests/test_uvicorn.py` has a test for each name of
`USED` and `OVERRIDDEN`, which fails if an upgrade of uvicorn removes the name, or calls it no more.
"""

from typing import Final

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["ASGI3Application", "FlowControl", "HttpToolsProtocol", "RequestResponseCycle"]

USED: Final = {
    "protocol": {
        "_unset_keepalive_if_required",
        "client",
        "cycle",
        "expect_100_continue",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "transport",
        "url",
    },
    "cycle": {
        "body",
        "keep_alive",
        "more_body",
        "response_complete",
        "response_started",
        "scope",
        "transport",
        "waiting_for_100_continue",
    },
    "flow": {"read_paused", "write_paused"},
    "server": {"config", "lifespan", "server_state", "servers"},
    "config": {"timeout_graceful_shutdown"},
    "state": {"tasks"},
    "lifespan": {"state"},
}
"""The attributes that the service uses, by the object that has them: `HttpToolsProtocol`,
`RequestResponseCycle`, `FlowControl`, `Server`, `Config`, `ServerState` and `LifespanOn`.
"""

OVERRIDDEN: Final = {
    "protocol": {"_start_asgi_task", "on_response_complete", "shutdown"},
    "flow": {"resume_reading"},
    "server": {"handle_exit", "on_tick", "shutdown", "startup"},
}
"""The methods of uvicorn that the service overrides, and that uvicorn calls."""
