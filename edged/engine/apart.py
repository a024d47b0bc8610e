"""An engine provided by a process of its own.

TensorRT keeps hundreds of megabytes after a build and ends the process when it breaks; a process that ends gives all
of it back, and takes nobody with it. It may be killed at any moment: the store is made for that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edged import errors
from edged.config import ModelConfig  # noqa: TC001 - msgspec reads the annotation
from edged.engine.entries import load_engine
from edged.engine.manifest import DamagedError
from edged.errors import CancelledError, EdgedError, InternalError, UnavailableError
from edged.parent_death import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.engine.entries import StoredEngine

    Progress = Callable[[str, int, int], None]

_POLL_SECONDS = 0.1


class Order(msgspec.Struct, frozen=True):
    """What the process is to provide."""

    model: ModelConfig
    cache: str
    limit: int
    targets: tuple[str, ...]
    rebuild: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    """How far it is."""

    what: str
    done: int
    total: int


class Provided(msgspec.Struct, frozen=True, tag=True):
    """Where the engine lies, and whether it was built now."""

    folder: str
    built: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why there is none: an error's code, message and field."""

    code: int
    message: str
    field: str


Answer = Step | Provided | Refused

_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
_encoder = msgspec.json.Encoder(enc_hook=str)


def provide_apart(
    model: ModelConfig,
    cache: Path,
    limit: int,
    *,
    targets: Sequence[str] = (),
    rebuild: bool = False,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> tuple[StoredEngine, bool]:
    """As :func:`edged.engine.provision.provide_model`, in a process of its own; this one loads no TensorRT.

    Args:
        model: The model of the configuration.
        cache: The cache folder.
        limit: Bytes it may hold.
        targets: Compute capabilities; empty for this machine's GPU.
        rebuild: Build also if there is an engine.
        progress: Called with (what is being done, units done, units in all), from another thread.
        cancelled: Set it to give up; the process is killed.

    Raises:
        EdgedError: What the process refused; CancelledError; InternalError if it died; UnavailableError if the engine
            was removed before it could be read.
    """
    order = Order(model, str(cache), limit, tuple(targets), rebuild)
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter and this module
            [sys.executable, "-m", "edged.engine.apart", str(write_end), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=(write_end,),
        )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    answers = _Answers(read_end, progress)
    try:
        _hand_over(process, _encoder.encode(order))
        while not answers.ended.wait(_POLL_SECONDS):
            if cancelled is not None and cancelled.is_set():
                raise CancelledError("the build was cancelled")
            if answers.error is not None:
                raise answers.error
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        answers.ended.wait()
    if answers.error is not None:
        raise answers.error
    if isinstance(answers.last, Refused):
        raise errors.from_code(answers.last.code, answers.last.message, field=answers.last.field)
    if not isinstance(answers.last, Provided):
        raise InternalError(
            f"model {model.name}: the process that builds its engine {_end(status)}; see the log"
        )
    try:
        return load_engine(Path(answers.last.folder)), answers.last.built
    except (DamagedError, OSError) as error:
        raise UnavailableError(
            f"model {model.name}: its engine {answers.last.folder} was there a moment ago and cannot be read now "
            f"({error}); did another process prune the cache?",
            retry_seconds=1.0,
        ) from error


class _Answers:
    """Reads what the process says until it ends."""

    def __init__(self, descriptor: int, progress: Progress | None) -> None:
        self.last: Answer | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._descriptor = descriptor
        self._progress = progress
        threading.Thread(target=self._read, name="engine-answers", daemon=True).start()

    def _read(self) -> None:
        try:
            with os.fdopen(self._descriptor, "rb") as pipe:
                for line in pipe:
                    answer = _ANSWERS.decode(line)
                    if not isinstance(answer, Step):
                        self.last = answer
                    elif self._progress is not None and self.error is None:
                        self._tell(self._progress, answer)
        except (OSError, msgspec.MsgspecError) as error:
            self.error = InternalError(
                f"the process that builds engines said what nobody understands: {error}"
            )
        finally:
            self.ended.set()

    def _tell(self, progress: Progress, step: Step) -> None:
        try:
            progress(step.what, step.done, step.total)
        except BaseException as error:  # noqa: BLE001 - raised again where provide_apart was called
            self.error = error


def _hand_over(process: subprocess.Popen[bytes], order: bytes) -> None:
    """Write the order; a process that is gone already says why through its end."""
    if process.stdin is not None:
        try:
            process.stdin.write(order)
            process.stdin.close()
        except BrokenPipeError:
            pass


def _end(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def main(arguments: list[str]) -> int:
    """Read an order from standard input, provide, answer through the descriptor that the first argument names.

    The second one is the process that waits for the answer.
    """
    from edged.engine.provision import provide_model  # noqa: PLC0415 - the parent must not load it
    from edged.engine.store import EngineStore  # noqa: PLC0415

    # TensorRT may time a layer for long before it reports a step, and an orphan would keep the GPU and the lock until then.
    die_with_parent(int(arguments[1]))
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order, dec_hook=_decode_path)
    with os.fdopen(int(arguments[0]), "wb", buffering=0) as pipe:

        def say(answer: Answer) -> None:
            pipe.write(_encoder.encode(answer) + b"\n")

        try:
            engine, built = provide_model(
                order.model,
                EngineStore(Path(order.cache), order.limit),
                targets=order.targets,
                rebuild=order.rebuild,
                progress=lambda what, done, total: say(Step(what, done, total)),
            )
        except EdgedError as error:
            say(Refused(error.code.value, error.message, error.field))
        else:
            say(Provided(str(engine.folder), built))
    return 0


def _decode_path(kind: type, value: Any) -> Any:  # noqa: ANN401 - msgspec's hook
    return kind(value)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
