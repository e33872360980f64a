"""The way of a short request stays as short as it is; `request_path` counts it."""

from pathlib import Path

from tests.support.request_path import count, lines_by_part

CHECKOUT = Path(__file__).parents[2]

MOST_FILES, MOST_FUNCTIONS = 22, 86
"""Lower both with the count."""

ONLY_BUSY = {"service/engine/cpu_places.py"}
"""Runs only if other processes use the cores, which a run of all tests does."""


def test_the_way_of_a_short_request() -> None:
    called = [one for one in count(CHECKOUT) if one.file not in ONLY_BUSY]
    names = {f"{one.file} {one.name}" for one in called}
    assert {
        "service/models/pipeline.py Pipeline.run",  # on the event loop
        "service/engine/onnx_engine.py OnnxEngine.run",  # on a thread of the scheduler
    } <= names
    assert not any(one.file == "service/tasks/fill_mask.py" for one in called)
    assert len({one.file for one in called}) <= MOST_FILES
    assert len(called) <= MOST_FUNCTIONS


def test_lines_are_counted_by_part(tmp_path: Path) -> None:
    service = tmp_path / "service" / "cloze" / "service"
    (service / "http").mkdir(parents=True)
    (service / "core.py").write_text("a = 1\n\nb = 2\n")
    (service / "http" / "gate.py").write_text("c = 3\n")
    assert lines_by_part(tmp_path) == {"core": 3, "http": 1}
