"""The clock of the service: the only module that asks the system for the time.

Whoever needs the time gets a clock from its caller, so a test or a simulation may pass another one.
Timers of asyncio follow the time of their event loop.
"""

import threading
import time
from typing import Final


class Clock:
    """Tells the time and waits. Another clock overrides all methods."""

    # The functions themselves: a method that calls them would cost each request some calls more.
    monotonic = staticmethod(time.monotonic)
    """Return seconds since a moment in the past; all processes of a machine share the moment."""

    wall = staticmethod(time.time)
    """Return seconds since 1970."""

    sleep = staticmethod(time.sleep)
    """Wait for some seconds."""

    wait = staticmethod(threading.Event.wait)
    """Wait until an event is set, for some seconds at most; return whether the event is set."""


CLOCK: Final = Clock()
"""The time of the system."""
