"""State of the engine as the daemon sees it."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """What the daemon can do for a client now; the values are the public API's names without their prefix."""

    LOADING = "LOADING"
    """The first engine starts or loads."""
    SERVING = "SERVING"
    """Requests are taken."""
    DRAINING = "DRAINING"
    """Running requests finish, new ones are refused; it ends with the engine's end."""
    RESTARTING = "RESTARTING"
    """The engine ended and a new one starts or loads."""
    FAILED = "FAILED"
    """The engine cannot be started; no new attempt is made."""
