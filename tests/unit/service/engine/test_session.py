"""Sessions: options, folders, packed weights, and the buffers of a device."""

import ctypes
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloze.model_store.processor import int8_instructions, int8_settings
from cloze.service.engine import session as sessions
from cloze.service.engine.session import (
    CpuSession,
    DeviceSession,
    cpu_session,
    is_aligned,
    temporary_folder,
)
from tests.support.mean_graph import TABLE, write_graph


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    write_graph(tmp_path / "g.onnx")
    return tmp_path / "g.onnx"


FEEDS = {
    "input_ids": np.array([[1, 2]], np.int32),
    "token_type_ids": np.zeros((1, 2), np.int32),
    "embed_sequences": np.array([0], np.int32),
}


@pytest.mark.parametrize(("threads", "spins"), [(1, "0"), (2, "1"), (3, "1")])
def test_options_of_a_session(
    graph: Path, threads: int, spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session: Any = cpu_session(graph, threads)
    options = session.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (threads, 1)
    assert options.log_severity_level == 4
    settings = {
        "session.intra_op.allow_spinning": spins,
        "session.force_spinning_stop": "1",
    } | int8_settings(int8_instructions())
    assert {name: options.get_session_config_entry(name) for name in settings} == settings
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert not session._enable_fallback
    monkeypatch.setattr(sessions, "int8_instructions", list)
    options = cpu_session(graph).get_session_options()  # type: ignore[attr-defined]
    assert options.get_session_config_entry("session.x64quantprecision") == "1", "it is exact"


@pytest.mark.parametrize(
    ("threads", "alone", "twice"), [(1, 0, False), (1, 1, False), (2, 2, False), (1, 2, True)]
)
def test_a_second_session_only_for_more_threads(
    graph: Path, monkeypatch: pytest.MonkeyPatch, threads: int, alone: int, twice: bool
) -> None:
    monkeypatch.setattr(sessions, "temporary_folder", lambda: graph.parent)
    before = sorted(graph.parent.iterdir())
    session: Any = cpu_session(graph, threads, alone)
    assert isinstance(session, CpuSession) == twice
    assert sorted(graph.parent.iterdir()) == before, "its files have no name any more"
    expected = TABLE[[1, 2]].mean(0)
    np.testing.assert_allclose(session.run(["embeddings"], FEEDS)[0][0], expected, rtol=1e-5)
    if twice:
        each = (session.side_by_side, session.alone)
        counts = [one.get_session_options().intra_op_num_threads for one in each]
        assert counts == [threads, alone]
        np.testing.assert_allclose(
            session.alone.run(["embeddings"], FEEDS)[0][0], expected, rtol=1e-5
        )


def test_without_a_folder_a_lone_request_has_one_core(
    graph: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "temporary_folder", lambda: None)
    with caplog.at_level(logging.INFO, "cloze"):
        session = cpu_session(graph, 1, 2)
    assert not isinstance(session, CpuSession)
    assert "no folder for temporary files is on a disk" in caplog.text


def test_weights_that_are_not_aligned_are_not_mapped() -> None:
    assert is_aligned(b"no packed weight")
    assert is_aligned(b"xMatMul+123|0;yGemm+9|64;zGemm+9|128;")
    assert not is_aligned(b"xMatMul+123|0;yGemm+9|32;zGemm+9|128;")
    assert not is_aligned(b"xMatMul+123|1;")


def mounts(folder: Path, *lines: str) -> Path:
    file = folder / "mounts"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_folder_on_a_disk_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    disk = "overlay / overlay rw 0 0"
    assert temporary_folder(mounts(tmp_path, disk)) == tmp_path
    assert temporary_folder(tmp_path / "missing") == tmp_path
    for kind, folder in (("tmpfs", tmp_path), ("ramfs", tmp_path.parent)):
        listed = mounts(tmp_path, disk, f"{kind} {folder} {kind} rw 0 0")
        assert temporary_folder(listed) == Path("/var/tmp"), "the nearest mount decides"
    listed = mounts(tmp_path, "tmpfs / tmpfs rw 0 0", f"ext4 {tmp_path} ext4 rw 0 0")
    assert temporary_folder(listed) == tmp_path
    listed = mounts(tmp_path, f"tmpfs {tmp_path} tmpfs rw 0 0", f"x {tmp_path} ext4 rw 0 0")
    assert temporary_folder(listed) == tmp_path, "the last mount holds"
    assert temporary_folder(mounts(tmp_path, "tmpfs / tmpfs rw 0 0")) is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "memory")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    listed = mounts(tmp_path, disk, f"tmpfs {tmp_path / 'memory'} tmpfs rw 0 0")
    assert temporary_folder(listed) == Path("/var/tmp"), "a link into memory"
    listed = mounts(tmp_path, disk, "tmpfs /var/tmp tmpfs rw 0 0")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    assert temporary_folder(listed) == Path("/tmp")


class Binding:
    """The binding of a run: notes where the inputs are."""

    def __init__(self) -> None:
        self.host: dict[str, Any] = {}
        self.inputs: dict[str, tuple[Any, ...]] = {}
        self.outputs: list[tuple[str, str]] = []

    def bind_cpu_input(self, name: str, array: Any) -> None:
        self.host[name] = array

    def bind_input(self, name: str, *place: Any) -> None:
        self.inputs[name] = place

    def bind_output(self, name: str, device: str) -> None:
        self.outputs.append((name, device))

    def copy_outputs_to_cpu(self) -> list[Any]:
        return [name for name, _ in self.outputs]


class Runtime:
    """A session of onnxruntime that notes what it runs."""

    def __init__(self) -> None:
        self.bindings: list[Binding] = []
        self.bytes: list[dict[str, bytes]] = []
        self.locked: list[bool] = []
        self.device: DeviceSession
        self.fails = False

    def io_binding(self) -> Binding:
        self.bindings.append(Binding())
        return self.bindings[-1]

    def run_with_iobinding(self, binding: Binding) -> None:
        self.locked.append(self.device._run_lock.locked())
        if self.fails:
            raise RuntimeError("no memory")
        self.bytes.append(
            {
                name: ctypes.string_at(
                    place[4], int(np.prod(place[3])) * np.dtype(place[2]).itemsize
                )
                for name, place in binding.inputs.items()
            }
        )


@pytest.fixture
def runtime() -> Runtime:
    made: Any = Runtime()
    made.device = DeviceSession(made, "cpu", 5)
    return made  # type: ignore[no-any-return]


def test_inputs_reach_the_device_in_one_buffer(runtime: Runtime) -> None:
    feeds = {
        "ids": np.arange(70, dtype=np.int32).reshape(7, 10)[:, ::2],  # not contiguous
        "top_k": np.array([3]),
        "none": np.zeros((0, 4), np.float32),
        "one": np.ones(64, np.float32),
        "last": np.array([9], np.int64),
    }
    assert runtime.device.run(["b", "a"], feeds) == ["b", "a"]
    (binding,) = runtime.bindings
    assert binding.outputs == [("b", "cpu"), ("a", "cpu")]
    assert list(binding.host) == ["top_k"]
    assert binding.host["top_k"] is feeds["top_k"]
    addresses = [place[4] for place in binding.inputs.values()]
    assert [address - addresses[0] for address in addresses] == [0, 256, 512, 768]
    assert [place[:4] for place in binding.inputs.values()] == [
        ("cpu", 5, np.int32, [7, 5]), ("cpu", 5, np.float32, [0, 4]),
        ("cpu", 5, np.float32, [64]), ("cpu", 5, np.int64, [1]),
    ]  # fmt: skip
    assert runtime.bytes == [
        {name: array.tobytes() for name, array in feeds.items() if name != "top_k"}
    ]
    assert runtime.locked == [True]
    assert not runtime.device._run_lock.locked()


@pytest.mark.parametrize(("rows", "size"), [(1, 2**16), (2**16, 2**16), (2**16 + 1, 2**17)])
def test_buffers_are_used_again_by_size(runtime: Runtime, rows: int, size: int) -> None:
    for number in range(3):
        runtime.device.run(["a"], {"x": np.full(rows, number, np.uint8)})
    assert {key: len(free) for key, free in runtime.device._free.items()} == {size: 1}
    ((host, device),) = runtime.device._free[size]
    assert host.nbytes == size
    assert device.numpy().nbytes == size
    assert len({binding.inputs["x"][4] for binding in runtime.bindings}) == 1
    assert [each["x"][0] for each in runtime.bytes] == [0, 1, 2]
    runtime.fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no memory"):
            runtime.device.run(["a"], {"x": np.ones(rows, np.uint8)})
    assert [len(free) for free in runtime.device._free.values()] == [1]
    assert not runtime.device._run_lock.locked()


class CudaRuntime:
    """As much of CUDA's runtime as `page_locked` calls, on the host's own memory."""

    def __init__(self, malloc: int) -> None:
        self.malloc, self.memory = malloc, ctypes.create_string_buffer(64)
        self.calls: list[str] = []

    def cudaSetDevice(self, device_id: int) -> int:  # noqa: N802
        self.calls.append(f"device {device_id}")
        return 0

    def cudaMallocHost(self, place: Any, size: Any) -> int:  # noqa: N802
        self.calls.append(f"allocate {size.value}")
        place._obj.value = ctypes.addressof(self.memory)
        return self.malloc

    def cudaGetLastError(self) -> int:  # noqa: N802
        self.calls.append("error taken back")
        return 2

    def cudaFreeHost(self, address: Any) -> int:  # noqa: N802
        self.calls.append(f"freed {address.value == ctypes.addressof(self.memory)}")
        return 0


def test_page_locked_memory_is_given_back_and_a_refusal_leaves_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good, full = CudaRuntime(0), CudaRuntime(2)
    monkeypatch.setattr(sessions, "runtime", lambda: good)
    array = sessions.page_locked(64, 1)
    array[:] = range(64)
    assert good.memory.raw == bytes(range(64))
    del array
    assert good.calls == ["device 1", "allocate 64", "freed True"]
    monkeypatch.setattr(sessions, "runtime", lambda: full)
    assert sessions.page_locked(64, 2) is None
    assert full.calls == ["device 2", "allocate 64", "error taken back"]
