"""Who is told that the engine lives, and how soon it is to say so again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.worker.engine_watch import EngineWatch


class LifeSigns:
    """The listeners."""

    def __init__(self) -> None:
        self.patience = 0.0
        """Seconds within which the engine gives a sign of life, or is found to give none."""
        self._on_alive: list[Callable[[], None]] = []
        self._on_patience: list[Callable[[], None]] = []

    def when_alive(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at every sign of life of the engine: a step, progress of loading, an idle heartbeat.

        Of a step that takes long, each look that finds it at work is one, as long as it may last.
        """
        self._on_alive.append(callback)

    def when_patience_changes(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever :attr:`patience` has changed."""
        self._on_patience.append(callback)

    def tell(self, watch: EngineWatch, *, alive: bool = False, looked: bool = False) -> None:
        """Tell what has changed.

        Args:
            watch: Of the engine.
            alive: It has given a sign of life.
            looked: Somebody has looked at it, which is not often: patience may become shorter. Where requests follow one
                another it would come and go with each. An engine that was seen at work in a long step is alive.
        """
        if watch.patience > self.patience or (looked and watch.patience != self.patience):
            self.patience = watch.patience
            for callback in self._on_patience:
                callback()
        if alive or (looked and watch.works):
            for callback in self._on_alive:
                callback()
