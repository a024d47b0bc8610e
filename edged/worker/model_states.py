"""What the daemon knows of each model: the engine's last report, or why there is none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from edged.errors import FailedPreconditionError, NotFoundError, UnavailableError
from edged.worker.messages import ModelReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from edged.config import Config, ModelConfig
    from edged.errors import EdgedError

_FIRST_LOAD_SECONDS = 5.0
"""What a client is told to wait for a model that has not been loaded before."""
_LEAST_SECONDS = 0.5


class ModelStates:
    """The reports, in the configuration's order.

    Args:
        config: The whole configuration.
    """

    def __init__(self, config: Config) -> None:
        self.reports: dict[str, ModelReport] = {}
        """Last known state of every model."""
        self._configured = {model.name: model for model in config.models}
        self._marks: dict[str, str] = {}
        self._faults: dict[str, str] = {}
        self._load_began: dict[str, float] = {}
        self._load_seconds: dict[str, float] = {}

    def find(self, name: str) -> ModelReport:
        """What is known of a model.

        Raises:
            NotFoundError: No model has that name.
        """
        report = self.reports.get(name)
        if report is None:
            names = ", ".join(self.reports)
            raise NotFoundError(f"no model is called {name}: there are {names}", field="model")
        return report

    def find_ready(self, name: str) -> ModelReport:
        """What is known of a model that takes requests.

        Raises:
            NotFoundError: No model has that name.
            UnavailableError: It is loading; ``retry_seconds`` is as long as its last load took, less what has passed.
            FailedPreconditionError: It is not loaded, or is being unloaded.
        """
        report = self.find(name)
        if report.state != "ready":
            raise self._refusal(name, report.state)
        return report

    def _refusal(self, name: str, state: str) -> EdgedError:
        """Why a model takes no requests, and what brings it to take some."""
        if state == "loading":
            expected = self._load_seconds.get(name, _FIRST_LOAD_SECONDS)
            began = self._load_began.get(name)
            wait = max(_LEAST_SECONDS, expected - (0.0 if began is None else time.monotonic() - began))
            return UnavailableError(
                f"model {name} is loading: try again in {wait:.1f} s", field="model", retry_seconds=wait
            )
        if state == "unloading":
            what = (
                f"is being unloaded and takes no new requests; edgectl load {name} loads it again afterwards"
            )
        elif name in self._faults:
            what = (
                f"is not loaded, because its last load failed ({self._faults[name]}); once the cause is mended, "
                f"edgectl load {name} tries again"
            )
        else:
            what = f"is not loaded; edgectl load {name} loads it"
        return FailedPreconditionError(
            f"model {name} {what}; edgectl status shows what is loaded", field="model"
        )

    def forget(self, loaded: Collection[str]) -> None:
        """No engine holds the models: those in ``loaded`` will be loaded by the next one."""
        self._marks = {name: "unloaded" for name in self._configured if name not in loaded}
        self.reports = {
            name: _blank(model, self._marks.get(name, "loading")) for name, model in self._configured.items()
        }

    def note(self, reports: Iterable[ModelReport]) -> None:
        """The engine has reported."""
        for report in reports:
            mark = self._marks.get(report.name)
            self.reports[report.name] = msgspec.structs.replace(report, state=mark) if mark else report

    def mark(self, name: str, state: str, fault: str = "") -> None:
        """Say what an operator does to a model.

        Args:
            name: Its name.
            state: ``loading``, ``unloading`` or ``unloaded``; empty: nothing any more.
            fault: Why it did not load, of one that is ``unloaded`` for that reason.
        """
        began = self._load_began.pop(name, None)
        self._faults.pop(name, None)
        if state:
            self._marks[name] = state
        else:
            self._marks.pop(name, None)
            if began is not None:
                self._load_seconds[name] = time.monotonic() - began
        if state == "loading":
            self._load_began[name] = time.monotonic()
        if fault:
            self._faults[name] = fault
        if state == "unloaded":
            self.reports[name] = _blank(self._configured[name], state)
        else:
            self.reports[name] = msgspec.structs.replace(self.reports[name], state=state or "ready")


def _blank(model: ModelConfig, state: str) -> ModelReport:
    """What is known of a model that no engine holds."""
    return ModelReport(
        name=model.name,
        state=state,
        executor=model.executor,
        device=model.device,
        dtype=model.dtype,
        context_length=model.context_length,
        max_sequences=model.max_sequences,
        pages=0,
        pages_free=0,
        running=0,
        waiting=0,
    )
