"""Waiting until a daemon serves: what each answer on the way means, for both clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import Code, DeadlineError
from edged.v1 import control_pb2

if TYPE_CHECKING:
    from edged.client.address import Address
    from edged.errors import EdgedError

POLL_SECONDS = 0.05
"""Between two questions."""
TURNED_AWAY = frozenset({Code.UNAUTHENTICATED, Code.PERMISSION_DENIED})
"""Codes of a daemon that is there and refuses this caller; asking again mends nothing."""


class Readiness:
    """What is known of a daemon that somebody waits for.

    Args:
        address: Where it is.
        timeout: Seconds to wait in all.
        now: The time, seconds of a clock that only goes forward.
    """

    def __init__(self, address: Address, timeout: float, now: float) -> None:
        self._address = address
        self._timeout = timeout
        self._end = now + timeout
        self._last: str | None = None

    def left(self, now: float) -> float:
        """Seconds that are left.

        Raises:
            DeadlineError: None is; the message says how far the daemon came.
        """
        left = self._end - now
        if left <= 0:
            raise DeadlineError(
                f"edged at {self._address} does not serve after {self._timeout:g} s: {self.state}"
            )
        return left

    def serves(self, status: control_pb2.GetStatusResponse) -> bool:
        """Whether this answer ends the wait."""
        self._last = describe_state(status)
        return status.state == control_pb2.STATE_SERVING

    @property
    def state(self) -> str:
        """What was heard last."""
        return self._last or "no answer yet"

    def failed(self, error: EdgedError) -> None:
        """Note a question that failed.

        Raises:
            EdgedError: That error, where waiting mends nothing: the daemon is there and turns this caller away.
        """
        if error.code in TURNED_AWAY:
            raise error
        # The last try's own short time says less than the state before it.
        if not isinstance(error, DeadlineError) or self._last is None:
            self._last = error.message


def state_name(state: int) -> str:
    """``serving`` of ``STATE_SERVING``; ``unknown`` of a state that this edgectl does not know."""
    try:
        return control_pb2.State.Name(state).removeprefix("STATE_").lower()
    except ValueError:
        return "unknown"


def describe_state(status: control_pb2.GetStatusResponse) -> str:
    """One line on a daemon: its state, what it loads, its last error where it does not serve."""
    parts = [state_name(status.state)]
    parts += [
        f"{model.name}: {model.loading} {model.loading_fraction:.0%}"
        for model in status.models
        if model.loading
    ]
    if status.last_error and status.state != control_pb2.STATE_SERVING:
        parts.append(status.last_error)
    return "; ".join(parts)
