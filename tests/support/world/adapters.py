"""Adapters of a world: folders as PEFT writes them, and engines that hold two of four."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from cloze.model_store.adapter import read_adapter
from cloze.model_store.adapter_section import AdaptedLayer, AdapterSupport
from cloze.model_store.sections import Graph, Layout, Precision
from cloze.service.engine import adapters
from cloze.service.models import adapters as model_adapters
from tests.support.world.kernel import Kernel, Thread

NAMES = ("adapter-1", "adapter-2", "adapter-3", "adapter-4")
"""The rows of an adapter's matrices have its number."""

_WIDTH = 4
_BYTES = 2 * _WIDTH * 4
SUPPORT = AdapterSupport(
    graph=Graph(
        file="a.onnx", layout=Layout.DENSE, precision=Precision.FP32, opset=20, operators={}
    ),
    prefixes=("bert.",),
    layers={"query": AdaptedLayer(numbers=(0,), inputs=_WIDTH, outputs=_WIDTH)},
    heads={},
)


def write(root: Path) -> None:
    """Write the adapters as folders."""
    for number, name in enumerate(NAMES, start=1):
        folder = root / name
        folder.mkdir(parents=True)
        config = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": 1, "lora_alpha": 1}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        start, rows = "base_model.model.query.lora_", np.full((1, _WIDTH), number, np.float32)
        tensors = {f"{start}A.weight": rows, f"{start}B.weight": np.ones((_WIDTH, 1), np.float32)}
        save_file(tensors, folder / "adapter_model.safetensors")


class Reader:
    """Stands for a `ThreadPoolExecutor` of one thread, which takes 20 ms to read an adapter."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._last: Thread | None = None

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future, before = Future[Any](), self._last

        def read() -> None:
            if before is not None:
                before.join()
            self._kernel.sleep(0.02)
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)

        self._last = self._kernel.spawn(read)
        return future


def loaded(kernel: Kernel) -> adapters.LoadedAdapters:
    """Return the adapters of an engine, which has room for two."""
    kernel.replace(adapters, "ThreadPoolExecutor", lambda *_: Reader(kernel))
    read = cache(lambda folder: read_adapter(folder, SUPPORT, {}))
    kernel.replace(model_adapters, "read_adapter", lambda folder, *_: read(folder))
    return adapters.LoadedAdapters(SUPPORT, 2 * _BYTES)


def number_of(registry: adapters.LoadedAdapters, one: Any) -> int:
    """Return the number in the first row of a loaded adapter; 0: there is no adapter."""
    return 0 if one is None else int(registry.tables[_WIDTH][one.rows[0, 0, 0]][0])
