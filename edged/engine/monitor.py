"""How far a build is, from TensorRT's nested phases, and the way to stop it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class _Phase:
    steps: int
    done: int = 0
    children: list[str] = field(default_factory=list)


class Phases:
    """The phases that run, each a step of the one around it."""

    def __init__(self) -> None:
        self._running: dict[str, _Phase] = {}
        self._parents: dict[str, str] = {}
        self._fraction = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of ``steps`` steps begins inside ``parent``."""
        self._running[name] = _Phase(max(steps, 1))
        if parent in self._running:
            self._parents[name] = parent
            self._running[parent].children.append(name)

    def complete(self, name: str, step: int) -> None:
        """A phase has done step ``step``, counted from 0."""
        if name in self._running:
            self._running[name].done = step + 1

    def finish(self, name: str) -> None:
        """A phase is over; the one around it counts the step itself."""
        self._running.pop(name, None)
        parent = self._parents.pop(name, None)
        if parent in self._running:
            self._running[parent].children.remove(name)

    @property
    def fraction(self) -> float:
        """Share of the outermost phase that is done, 0 to 1; never less than it was."""
        roots = [name for name in self._running if name not in self._parents]
        if roots:
            self._fraction = max(self._fraction, self._share(roots[0]))
        return self._fraction

    def _share(self, name: str) -> float:
        phase = self._running[name]
        inner = max((self._share(child) for child in phase.children), default=0.0)
        return min(1.0, (phase.done + inner) / phase.steps)


def make_monitor(trt: Any, report: Callable[[float], None], cancelled: threading.Event) -> Any:  # noqa: ANN401
    """A progress monitor for the bindings ``trt``.

    Args:
        trt: The bindings.
        report: Called with the share that is done, at most once for each thousandth.
        cancelled: Stops the build when it is set.

    Returns:
        The monitor; its ``error`` is what ``report`` raised, which stops the build too.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        """TensorRT calls it from any thread of the build."""

        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.error: BaseException | None = None
            self._phases = Phases()
            self._told = -1
            self._lock = threading.Lock()

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            with self._lock:
                self._phases.start(phase, parent, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            with self._lock:
                self._phases.complete(phase, step)
                self._tell()
            return not cancelled.is_set() and self.error is None

        def phase_finish(self, phase: str) -> None:
            with self._lock:
                self._phases.finish(phase)

        def _tell(self) -> None:
            thousandth = int(1000 * self._phases.fraction)
            if thousandth <= self._told or self.error is not None:
                return
            self._told = thousandth
            # What the caller's function raises would end inside TensorRT: the build stops and the caller gets it.
            try:
                report(self._phases.fraction)
            except BaseException as error:  # noqa: BLE001
                self.error = error

    return Monitor()
