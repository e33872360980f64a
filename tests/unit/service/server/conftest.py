"""The asynchronous tests of this folder run on a loop whose clock leaps to the next timer."""

from typing import Any

import pytest

from tests.support.leaping_loop import LEAPING


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return LEAPING
