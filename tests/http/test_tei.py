"""Requests of text-embeddings-inference's clients get from us what they got from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cloze.export.publish import ExportOptions, export
from cloze.model_store import Store
from cloze.model_store.manifest import Precision
from tests.oracles import tei
from tests.support.serving import Server, running_server


@pytest.fixture(scope="module")
def checkpoints_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return tei.save_models(tmp_path_factory.mktemp("tei-checkpoints"))


@pytest.fixture(scope="module", params=list(tei.KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of model, alone on its server as text-embeddings-inference serves it."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    kind: str, checkpoints_by_kind: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    store = tmp_path_factory.mktemp(f"{kind}-store")
    export(str(checkpoints_by_kind[kind]), kind, Store(store), ExportOptions())
    with running_server(store, "--precision", Precision.FP32) as server:
        yield server


@pytest.fixture(scope="module")
def ours(kind: str, server: Server) -> list[tei.Answer]:
    return tei.ask(server.url, kind)


def test_answers_are_those_recorded(kind: str, ours: list[tei.Answer]) -> None:
    """No answer of ours differs from theirs, except on purpose."""
    found = [
        f"{case.name}: {problem}"
        for case, their, our in zip(tei.CASES[kind], tei.ANSWERS[kind], ours, strict=True)
        if (problem := tei.difference(case, their, our))
    ]
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:50])


def test_each_difference_on_purpose_is_documented() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
    cases = [case for cases in tei.CASES.values() for case in cases]
    reasons = {reason for case in cases for reason in case.on_purpose.values()}
    assert len(reasons) > 5
    for reason in (*reasons, tei.JSON_ERRORS, tei.OPENAI_ERRORS):
        assert reason in " ".join(guide.split()), reason
