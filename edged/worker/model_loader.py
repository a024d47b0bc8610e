"""Loads models: all of them before the engine serves, and one more beside those that serve.

What takes long (reading weights) runs in a thread of its own, so that the streams of other models go on; the loop takes
what it made. A model on a GPU is loaded in the loop's own thread: capturing graphs while another thread launches steps is
not safe.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from typing import TYPE_CHECKING

from edged.errors import EdgedError, InternalError
from edged.log import get_logger
from edged.memory.heap import trim_heap
from edged.worker.messages import Loading
from edged.worker.runner import ModelRunner
from edged.worker.self_check import draw_one_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.config import Config, ModelConfig
    from edged.decoding.detokenizer import TokenTexts
    from edged.executor.base import Executor
    from edged.worker.channel import EngineChannel

    LoadExecutor = Callable[[ModelConfig], tuple[str, Executor]]
    LoadTexts = Callable[[ModelConfig], TokenTexts]

_PROGRESS_SECONDS = 0.1
_log = get_logger("engine")


class ModelLoader:
    """Makes runners.

    Args:
        config: The whole configuration.
        channel: To the daemon; the loop's thread alone touches it.
        executor_of: Makes the executor of a model, not loaded yet, and says its name.
        texts_of: Loads a model's tokenizer.
    """

    def __init__(
        self, config: Config, channel: EngineChannel, executor_of: LoadExecutor, texts_of: LoadTexts
    ) -> None:
        self._config = config
        self._channel = channel
        self._executor_of = executor_of
        self._texts_of = texts_of
        self._thread: threading.Thread | None = None
        self._progress: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self._made: queue.SimpleQueue[tuple[int, str, ModelRunner | EdgedError]] = queue.SimpleQueue()

    @property
    def is_loading(self) -> bool:
        """Whether a model loads in the thread, or what came of it has not been taken."""
        return self._thread is not None

    def load(self, name: str) -> ModelRunner:
        """Load a model now, telling the daemon how far it is.

        Raises:
            EdgedError: It does not load, or its first token is wrong.
            ChannelClosedError: The daemon is gone.
        """
        return self._load(name, self._tell)

    def begin(self, query: int, name: str) -> None:
        """Begin to load a model; :meth:`take` gives what comes of it.

        Args:
            query: Number of the daemon's question, given back.
            name: Name of the model.
        """

        def run(tell: Callable[[Loading], None]) -> None:
            try:
                made: ModelRunner | EdgedError = self._load(name, tell)
            except EdgedError as error:
                made = error
            except Exception as error:  # noqa: BLE001 - told to the daemon, whatever it is; the other models go on
                _log.exception("a model does not load")
                made = InternalError(f"model {name} does not load: {type(error).__name__}: {error}")
            self._made.put((query, name, made))

        model = self._find(name)
        self._thread = threading.Thread(
            target=run, args=(self._progress.put,), name=f"load {name}", daemon=True
        )
        if model.device == "cuda":
            run(self._tell)
        else:
            self._thread.start()

    def take(self) -> list[tuple[int, str, ModelRunner | EdgedError]]:
        """Queue what the daemon is to be told of progress; return what has been made: (query, name, runner or fault)."""
        while not self._progress.empty():
            self._channel.send(self._progress.get())
        made = []
        while not self._made.empty():
            made.append(self._made.get())
            self._thread = None
        if made:
            settle()
        return made

    def _tell(self, message: Loading) -> None:
        """Send progress at once, in the loop's thread."""
        self._channel.send(message)
        self._channel.flush()

    def _load(self, name: str, tell: Callable[[Loading], None]) -> ModelRunner:
        model = self._find(name)
        progress = _Progress(tell, name)
        progress("tokenizer", 0, 1)
        texts = self._texts_of(model)  # before the weights, so that what it needs adds nothing to the peak
        progress("executor", 0, 1)
        executor_name, executor = self._executor_of(model)
        try:
            executor.load(progress)
            progress("first token", 0, 1)
            seconds = draw_one_token(name, executor)
            progress("first token", 1, 1)
            runner = ModelRunner(
                model,
                executor,
                texts,
                executor_name=executor_name,
                queue_capacity=self._config.queue.capacity,
                aging=self._config.queue.aging,
                channel=self._channel,
            )
            progress("vocabulary", 0, 1)
            runner.prepare()
        except BaseException:
            executor.close()
            raise
        _log.info("model loaded", model=name, executor=executor_name, first_token_seconds=round(seconds, 4))
        return runner

    def _find(self, name: str) -> ModelConfig:
        return next(model for model in self._config.models if model.name == name)


def settle() -> None:
    """What is loaded stays: the collector need not walk it again in the middle of a step. What is gone is given back."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()


class _Progress:
    """Makes Loading messages, not more often than a person can see.

    Args:
        tell: Takes them.
        model: Name of the model that loads.
    """

    def __init__(self, tell: Callable[[Loading], None], model: str) -> None:
        self._tell = tell
        self._model = model
        self._what = ""
        self._sent = 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        """Report ``done`` of ``total`` units of ``what``."""
        now = time.monotonic()
        if what == self._what and done < total and now - self._sent < _PROGRESS_SECONDS:
            return
        self._what, self._sent = what, now
        self._tell(Loading(self._model, what, done, total))
