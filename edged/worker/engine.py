"""The engine process: ``python -m edged.worker.engine --fd N``, started by the daemon's supervisor.

It takes its configuration from the channel, loads every model, draws one real token with each, says Ready and serves
until the daemon drains it, shuts it down or is gone. Exit status: 0 after a drain, a shutdown or the daemon's end; 1
after a fault, which EngineFailed has described if the channel still stood; 2 if it was not started by a supervisor.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable

from edged.config import ModelConfig
from edged.decoding.detokenizer import TokenTexts
from edged.errors import Code, EdgedError, InternalError, UnavailableError
from edged.executor.base import Executor
from edged.log import configure, get_logger
from edged.parent_death import die_with_parent
from edged.worker.channel import ChannelClosedError, EngineChannel
from edged.worker.loading import load_executor, load_texts
from edged.worker.loop import EngineLoop
from edged.worker.messages import Configure, EngineFailed, Ready
from edged.worker.model_loader import ModelLoader, settle
from edged.worker.priority import take_way
from edged.worker.runner import ModelRunner  # noqa: TC001 - as the other imports of a process

_log = get_logger("engine")

LoadExecutor = Callable[[ModelConfig], tuple[str, Executor]]
LoadTexts = Callable[[ModelConfig], TokenTexts]


def serve(
    connection: socket.socket,
    *,
    executor_of: LoadExecutor = load_executor,
    texts_of: LoadTexts = load_texts,
) -> int:
    """Be the engine on ``connection``; return the exit status.

    Args:
        connection: The engine's end of the channel.
        executor_of: Makes the executor of a model, not loaded yet, and says its name.
        texts_of: Loads a model's tokenizer.
    """
    configure(process="engine")
    channel = EngineChannel(connection)
    try:
        first = _receive_config(channel)
        log = first.config.log
        configure(log.level, log.format, process="engine")
        loader = ModelLoader(first.config, channel, executor_of, texts_of)
        try:
            runners = _load_models(channel, loader, _names(first))
            loop = EngineLoop(channel, runners, loader, check_steps=log.level == "debug")
        except EdgedError as error:
            # What edged refuses it refuses again; a wrong first token or a busy device may be gone the next time.
            fatal = not isinstance(error, InternalError | UnavailableError)
            _log.error("a model does not load", why=error.message, fatal=fatal)
            channel.send(EngineFailed(error.code.value, error.message, fatal=fatal))
            return 1
        end = loop.run()
    except ChannelClosedError as error:
        _log.warning("the engine ends", why=str(error))
        return 0
    except Exception as error:  # noqa: BLE001 - told to the daemon, whatever it is
        _log.exception("the engine ends after a fault")
        channel.send(EngineFailed(Code.INTERNAL.value, f"{type(error).__name__}: {error}"))
        return 1
    else:
        _log.info("the engine ends", why=end.value)
        return 0
    finally:
        channel.close()


def _receive_config(channel: EngineChannel) -> Configure:
    """Wait for the first message.

    Raises:
        ChannelClosedError: The daemon is gone.
        TypeError: The first message is another one.
    """
    messages = channel.receive(None)
    while not messages:
        messages = channel.receive(None)
    if not isinstance(messages[0], Configure) or len(messages) > 1:
        raise TypeError(f"the first message is {type(messages[0]).__name__}, not Configure alone")
    return messages[0]


def _names(first: Configure) -> tuple[str, ...]:
    """The models to load."""
    return tuple(model.name for model in first.config.models) if first.load is None else first.load


def _load_models(channel: EngineChannel, loader: ModelLoader, names: Iterable[str]) -> list[ModelRunner]:
    """Load and check every model, telling the daemon how far it is.

    Raises:
        EdgedError: A model does not load, or its first token is wrong.
        ChannelClosedError: The daemon is gone.
    """
    runners = [loader.load(name) for name in names]
    settle()
    channel.send(Ready(tuple(runner.report() for runner in runners)))
    channel.flush()
    return runners


def main(arguments: list[str] | None = None) -> int:
    """Run as a process."""
    parser = argparse.ArgumentParser(prog="edged.worker.engine", description="Started by the edged daemon.")
    parser.add_argument("--fd", type=int, required=True, help="file descriptor of the channel")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    options = parser.parse_args(arguments)
    # A terminal's ^C and systemd's SIGTERM reach the whole group; the daemon decides what they mean for the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(options.parent)
    faulthandler.enable()  # a crash in a library, or the watchdog's SIGABRT, prints where every thread is
    take_way()
    try:
        os.set_inheritable(options.fd, False)
        connection = socket.socket(fileno=options.fd)
    except OSError as error:
        print(f"edged.worker.engine: descriptor {options.fd} is no socket: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return serve(connection)


if __name__ == "__main__":
    sys.exit(main())
