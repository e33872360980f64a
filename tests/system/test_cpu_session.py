"""Batches that run alone use all cores, with the same results and the same weights in memory."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from cloze.service.engine.session import CpuSession, cpu_session, temporary_folder
from cloze.service.errors import StartupError
from cloze.service.models.served_models import onnx_engine
from cloze.service.settings import load_settings
from tests.support.command import call

WIDTH, PRODUCTS = 1024, 8
WEIGHTS_MB = PRODUCTS * WIDTH * WIDTH * 4 / 2**20


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a graph of eight products whose weights take 32 MB."""
    rng = np.random.default_rng(0)
    nodes, weights = [], []
    for number in range(PRODUCTS):
        weight = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
        weights.append(onnx.numpy_helper.from_array(weight, f"w{number}"))
        nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"x{number + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", WIDTH])
        for name in ("x0", f"x{PRODUCTS}")
    ]
    file = tmp_path_factory.mktemp("graph") / "graph.onnx"
    body = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save_model(
        model, file, save_as_external_data=True, location="weights.bin", size_threshold=1024
    )
    return file


@pytest.fixture
def disk() -> None:
    if temporary_folder() is None:
        pytest.skip("every folder for temporary files is in memory")


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("rows", [1, 13, 200])
def test_threads_change_no_bit(graph: Path, rows: int) -> None:
    feeds = {"x0": np.random.default_rng(rows).normal(size=(rows, WIDTH)).astype(np.float32)}
    outputs = [f"x{PRODUCTS}"]
    (expected,) = cpu_session(graph).run(outputs, feeds)
    twice = cpu_session(graph, 1, 2)
    for session in (twice, twice.side_by_side, twice.alone):
        np.testing.assert_array_equal(session.run(outputs, feeds)[0], expected)


@pytest.mark.usefixtures("disk")
def test_sessions_that_open_side_by_side_have_threads_of_their_own(graph: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        sessions = [*pool.map(lambda _: cpu_session(graph, 1, 2), range(8))]
    opened = [one.alone for one in sessions if isinstance(one, CpuSession)]
    helpers: list[set[int]] = [vars(session)["_helpers"] for session in opened]
    assert [len(own) for own in helpers] == [1] * 8
    assert len(set().union(*helpers)) == 8


def private_mb(graph: Path, alone_threads: int) -> float:
    """Return the memory in MB that a process takes for open sessions, without mapped files."""
    code = f"""
import re
from pathlib import Path
import numpy as np
from cloze.service.engine.session import cpu_session
def private():
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"Pss_Anon: +(\\d+)", text)[1]) / 1024
before = private()
session = cpu_session(Path({str(graph)!r}), 1, {alone_threads})
for each in (getattr(session, "alone", session), session):
    each.run(["x{PRODUCTS}"], {{"x0": np.ones((2, {WIDTH}), np.float32)}})
print(private() - before)
"""
    done = call(sys.executable, "-c", code, timeout=60)
    return float(done.stdout)


@pytest.mark.usefixtures("disk")
def test_both_sessions_share_the_weights(graph: Path) -> None:
    one = private_mb(graph, 0)
    # Less than all: some of it the imports have freed.
    assert one > 0.9 * WEIGHTS_MB, "one session packs the weights into memory of its own"
    assert private_mb(graph, 2) < WEIGHTS_MB / 2, "two sessions map them from a file"


def test_more_threads_than_cores_are_refused() -> None:
    settings = load_settings({"intra_op_threads": 1024})
    with pytest.raises(
        StartupError, match=r"^intra_op_threads is 1024, but this process may use \d+ cores?$"
    ):
        onnx_engine(settings, 0)
