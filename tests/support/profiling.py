"""Where a session's nodes ran, by its own profile."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import onnxruntime as ort

from cloze.service.engine import session


def profiled(prefix: str) -> Callable[[], ort.SessionOptions]:
    """In place of `session._options`: sessions write what they ran to files that begin so, when
    they end profiling.
    """
    plain = session._options

    def options() -> ort.SessionOptions:
        made = plain()
        made.enable_profiling, made.profile_file_prefix = True, prefix
        return made

    return options


def placed(profiles: Iterable[Path]) -> Counter[str]:
    """How often each operator ran on each provider, as ``PROVIDER OPERATOR``."""
    events = [event for file in profiles for event in json.loads(file.read_text())]
    nodes = [
        event["args"]
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")
    ]
    return Counter(f"{node['provider']} {node['op_name']}" for node in nodes)
