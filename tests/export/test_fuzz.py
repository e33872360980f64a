"""What reads bytes from elsewhere, on the kept inputs and on generated ones; see `tests/fuzz`.

`pytest -m slow tests/export/test_fuzz.py` searches for minutes, and keeps each input that fails in the
corpus. `--fuzz-seconds` is the time per target.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fuzz import manifest_target, onnx_target, request_target
from tests.fuzz.search import Failure, Target, search, search_for

TARGETS = {
    module.TARGET.name: module.TARGET for module in (manifest_target, request_target, onnx_target)
}
CORPUS = [file for target in TARGETS.values() for file in sorted(target.corpus.iterdir())]

each_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_a_kept_input_is_handled(file: Path, tmp_path: Path) -> None:
    is_accepted = TARGETS[file.parent.name].run(file.read_bytes(), tmp_path)
    if file.suffix:  # what a search keeps has none
        assert file.suffix == (".accepted" if is_accepted else ".refused")


@each_target
def test_valid_inputs_are_accepted(target: Target, tmp_path: Path) -> None:
    """Else the damaged ones would be refused for the wrong reason."""
    assert all(target.run(data, tmp_path) for data in target.valid)


@each_target
def test_generated_inputs_are_handled(target: Target, tmp_path: Path) -> None:
    fail_with(search(target, tmp_path, target.examples), "not kept")


@pytest.mark.slow
@pytest.mark.timeout(7200)
@each_target
def test_a_long_search_finds_nothing(
    target: Target, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    failures = search_for(target, tmp_path, request.config.getoption("--fuzz-seconds"))
    fail_with(failures, "kept as " + " ".join(str(each.save(target.corpus)) for each in failures))


def fail_with(failures: Sequence[Failure], kept: str) -> None:
    """Fail with the first of the failures, and say where the inputs are."""
    for failure in failures:
        pytest.fail(f"{failure.error!r} on {failure.data!r} ({kept})", pytrace=False)
