"""What the service uses of uvicorn beyond its documentation.

No other module imports uvicorn's inner modules. `tests/test_uvicorn.py` has a test for each name of
`USED` and `OVERRIDDEN`, which fails if an upgrade of uvicorn removes the name, or calls it no more.
"""

from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["FlowControl", "HttpToolsProtocol"]

USED: Final = {
    "protocol": {
        "_unset_keepalive_if_required",
        "app_state",
        "client",
        "cycle",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "timeout_keep_alive",
        "transport",
        "url",
    },
    "cycle": {"more_body", "response_complete"},
    "flow": {"read_paused"},
    "server": {"config", "lifespan", "server_state", "servers", "should_exit"},
    "config": {"timeout_graceful_shutdown"},
    "state": {"tasks"},
    "lifespan": {"state"},
}
"""The attributes that the service uses, by the object that has them: `HttpToolsProtocol`,
`RequestResponseCycle`, `FlowControl`, `Server`, `Config`, `ServerState` and `LifespanOn`.
"""

OVERRIDDEN: Final = {
    "protocol": {"on_response_complete", "shutdown", "timeout_keep_alive_handler"},
    "flow": {"resume_reading"},
    "server": {"handle_exit", "shutdown", "startup"},
}
"""The methods of uvicorn that the service overrides, and that uvicorn calls."""
