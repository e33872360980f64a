"""A start with too little memory ends with one line, before the kernel ends it without one."""

import errno
import os
import sys
from pathlib import Path

import pytest

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from cloze.service.core import Device
from cloze.service.engine.graph_choice import least_weight_bytes
from cloze.service.errors import StartupError
from cloze.service.models import served_models
from cloze.service.models.served_models import check_memory
from cloze.service.server.startup import memory_problem
from cloze.service.settings import Settings
from tests.support.command import call
from tests.support.serving import bare_environment


def test_models_that_cannot_fit_are_named(
    tiny_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Store(tiny_store).open("bert")
    weights = (Path(tiny_store) / "bert" / "1" / "weights.bin").stat().st_size
    for limit in (None, 70_000_000 + weights):
        monkeypatch.setattr(served_models, "memory_limit", lambda limit=limit: limit)
        check_memory([bundle], Settings())
    monkeypatch.setattr(served_models, "memory_limit", lambda: 69_000_000 + weights)
    with pytest.raises(StartupError) as raised:
        check_memory([bundle], Settings())
    assert "the memory limit of this process is" in str(raised.value)
    assert "bert@1" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_only_the_weights_of_the_graph_that_runs_count(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    """An int8 graph has a file of its own for the matrices, and the embeddings of the fp32 one."""
    options = ExportOptions(tasks=("fill-mask",), precisions=(Precision.INT8,))
    export(str(checkpoints["bert"]), "bert", Store(tmp_path), options)
    bundle = Store(tmp_path).open("bert")
    fp32, int8 = (
        least_weight_bytes(bundle, Device.CPU, precision)
        for precision in (Precision.FP32, Precision.INT8)
    )
    sizes = {name: file.size for name, file in bundle.manifest.files.items()}
    assert 0.95 * sizes["weights.bin"] < fp32 <= sizes["weights.bin"]
    assert sizes["weights-int8.bin"] < int8 < 0.6 * fp32
    assert least_weight_bytes(bundle, Device.AUTO, Precision.INT8) == int8
    unsupported = least_weight_bytes(bundle, Device.CPU, Precision.FP16)
    assert unsupported == 0, "the engine refuses the precision, and says why"


@pytest.mark.parametrize("kilobytes", [500_000, 800_000])
def test_a_limit_of_the_address_space_ends_with_a_line(tiny_store: Path, kilobytes: int) -> None:
    """Whatever fails first: an allocation of Python's, one of onnxruntime's, or a thread."""
    serve = f"{sys.executable} -m cloze serve --port 0 --workers 8 --model-store {tiny_store}"
    env = bare_environment(PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    limited = call(
        "bash", "-c", f"ulimit -v {kilobytes}; exec {serve}", check=False, env=env, timeout=60
    )
    assert limited.returncode == 2, limited.stderr
    assert "Traceback" not in limited.stderr
    last = limited.stderr.splitlines()[-1]
    assert last.startswith("cloze: there is not enough memory to start (")
    assert "ulimit -v" in last


def test_what_is_no_lack_of_memory_keeps_its_own_error() -> None:
    for error in (ValueError("a"), OSError(errno.ENOENT, "no file"), RuntimeError("a bug")):
        assert memory_problem(error) is None
    for error in (MemoryError(), OSError(errno.ENOMEM, "x"), StartupError("std::bad_alloc")):
        assert "raise the limit of memory" in str(memory_problem(error))
