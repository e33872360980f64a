"""The soak in short forms on a real server."""

from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from lab.soak.processes import KINDS
from lab.soak.run import SoakPlan, soak
from lab.soak.verdict import Check


def failed(results: Sequence[Check]) -> list[str]:
    return [f"{check.name}: {check.figures}" for check in results if not check.passed]


@pytest.mark.slow
def test_every_fault_in_turn(tmp_path: Path) -> None:
    kinds = tuple(kind for name, kind in KINDS.items() if name != "reload")
    plan = SoakPlan(seconds=80.0, rate=60, faults=kinds, fault_every_s=8.0, sample_every_s=2.0)
    observed, results = soak(plan, tmp_path)
    assert not failed(results)
    assert {fault.kind for fault in observed.faults} == set(kinds)
    document = orjson.loads((tmp_path / "soak.json").read_bytes())
    assert sum(document["outcomes"].values()) == observed.sent
    assert "| kill-engine | engine-0 |" in (tmp_path / "soak.md").read_text()


@pytest.mark.slow
def test_one_process(tmp_path: Path) -> None:
    _, results = soak(SoakPlan(seconds=60.0, frontends=0, rate=60, sample_every_s=2.0), tmp_path)
    assert not failed(results)
