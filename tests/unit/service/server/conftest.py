"""The asynchronous tests of this folder run on a loop whose clock leaps to the next timer."""

from tests.unit.service.http.conftest import anyio_backend as anyio_backend
