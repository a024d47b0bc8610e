"""What the nodes of an engine find beside their tensors: the pages, the scratch memory and the kernels of its model.

An executor opens a session for the stream it runs its engine on, and nodes find it by that stream's handle. TensorRT
gives a node a bare handle, and PyCUDA cannot make a stream of one; so the session also is the way to the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

    from plugins_trt.contract import Batch, DeviceArray, SelectionRule
    from plugins_trt.ternary_linear.contract import TernaryLinear
    from plugins_trt.verify_tree.contract import VerifyTree
    from plugins_trt.w4a16_linear.contract import W4A16Linear


@dataclass(frozen=True)
class AttentionCall:
    """One attention node's work. T tokens, H query heads, G KV heads, D elements of a head."""

    layer: int
    batch: Batch
    q: DeviceArray  # [T, H, D], rows (H + 2 G) D apart
    k: DeviceArray  # [T, G, D], likewise
    v: DeviceArray  # [T, G, D], likewise
    cosine: DeviceArray  # float32 [max_positions, D / 2]
    sine: DeviceArray  # float32 [max_positions, D / 2]
    q_norm: DeviceArray | None  # [D]
    k_norm: DeviceArray | None  # [D]
    epsilon: float
    selection: SelectionRule | None
    out: DeviceArray  # [T, H, D]


class Session(Protocol):
    """What one executor gives its engine's nodes."""

    @property
    def tree(self) -> bool:
        """Whether the step that is enqueued (or captured) verifies a tree: its masks then count."""

    @property
    def symmetric(self) -> Collection[str]:
        """Names of the 4-bit weights whose zero points are all 8: some kernels are faster then."""

    def attend(self, call: AttentionCall) -> None:
        """Append, select and attend on the session's stream.

        Raises:
            LaunchError: An argument is refused; nothing ran.
        """

    def multiply(self, product: W4A16Linear | TernaryLinear) -> None:
        """Multiply with packed weights on the session's stream.

        Raises:
            LaunchError: An argument is refused; nothing ran.
        """

    def verify(self, tree: VerifyTree, *, keep: bool) -> None:
        """Find the paths of a step's trees on the session's stream, and move what they accept if it is to be kept.

        Raises:
            LaunchError: An argument is refused; nothing ran.
        """


class SessionError(RuntimeError):
    """An engine runs on a stream that no executor opened a session for."""


_sessions: dict[int, Session] = {}


def open_session(stream: int, session: Session) -> None:
    """Let the nodes that run on this stream (its handle) find the session.

    Raises:
        SessionError: The stream has one.
    """
    if stream in _sessions:
        raise SessionError(f"stream {stream:#x} has a session already: an engine has a stream of its own")
    _sessions[stream] = session


def close_session(stream: int) -> None:
    """Forget the stream's session, if it has one."""
    _sessions.pop(stream, None)


def session_of(stream: int) -> Session:
    """The session of a stream.

    Raises:
        SessionError: It has none.
    """
    session = _sessions.get(stream)
    if session is None:
        raise SessionError(
            f"stream {stream:#x} has no session: open one before the engine runs on it, and let the engine use no "
            "auxiliary streams"
        )
    return session
