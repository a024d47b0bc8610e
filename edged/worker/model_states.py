"""What the daemon knows of each model: the engine's last report, or why there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from edged.errors import FailedPreconditionError, NotFoundError
from edged.worker.messages import ModelReport

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from edged.config import Config, ModelConfig


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
            FailedPreconditionError: It is not loaded.
        """
        report = self.find(name)
        if report.state != "ready":
            state = "not loaded" if report.state == "unloaded" else report.state
            raise FailedPreconditionError(
                f"model {name} is {state}; edgectl load {name} loads it, edgectl status shows what is loaded",
                field="model",
            )
        return report

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

    def mark(self, name: str, state: str) -> None:
        """Say what an operator does to a model: ``loading``, ``unloading`` or ``unloaded``; empty: nothing any more."""
        if state:
            self._marks[name] = state
        else:
            self._marks.pop(name, None)
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
