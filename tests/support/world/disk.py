"""The disk of a world, which can be full: what a server writes to it are the weights of engines."""

import errno
import os
from pathlib import Path

from cloze.model_store import Bundle
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.engine import onnx_engine, session
from tests.support.world.kernel import Kernel


class Disk:
    """A folder for temporary files; the real code opens sessions there, without a runtime.

    Attributes:
        is_full: whether writes fail.
    """

    def __init__(self, kernel: Kernel, folder: Path, *, has_adapters: bool) -> None:
        self.is_full = False
        self._options = onnx_engine.SessionOptions(alone_threads=2, adapter_bytes=int(has_adapters))
        kernel.replace(onnx_engine, "check_graph", lambda *_: None)
        kernel.replace(session, "temporary_folder", lambda: folder)
        kernel.replace(session, "return_freed_memory", lambda: None)
        kernel.replace(session, "SpreadSession", lambda *_: None)
        kernel.replace(session, "_prepare", self._write)

    def _write(self, _: Path, prepared: Path) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(prepared))

    def has_lone_session(self, bundle: Bundle) -> bool:
        """Open the sessions of an engine; return whether lone runs have one of their own.

        Raises:
            StartupError: adapters need the disk, and it is full.
        """
        opened = onnx_engine._open_on_device(bundle, Device.CPU, Precision.FP32, self._options)
        return isinstance(opened[2], session.CpuSession)
