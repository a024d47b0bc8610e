"""Starts and stops everything: ``edged --config FILE``.

Exit status: 0 after a drain, also one whose time ran out; 1 after a fault of edged's own; 2 for a wrong command line;
66 when a model folder is refused; 69 when the daemon cannot listen; 75 when the engine cannot be started; 78 when the
configuration is refused or does not fit its memory budget; 130 or 143 when a second SIGINT or SIGTERM cut the drain
short.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import gc
import math
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edged import __version__, log
from edged.config_reader import read_config
from edged.errors import (
    CheckpointError,
    Code,
    ConfigError,
    EdgedError,
    LedgerError,
    ListenError,
)
from edged.executor.available import choose_executor
from edged.memory.ledger import plan_memory, plan_residency
from edged.models.folder import check_folder
from edged.reload import reload_config
from edged.server.listeners import Listeners
from edged.server.served_models import ServedModels
from edged.server.server import Server
from edged.systemd import CrashRecord, Notifier
from edged.units import format_size
from edged.worker.priority import give_way
from edged.worker.restarts import STABLE_SECONDS
from edged.worker.state import State
from edged.worker.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.config import Config
    from edged.memory.ledger import Ledger

_PROGRESS_SECONDS = 1.0
_STOP_MARGIN_SECONDS = 15.0
_WATCHDOG_MARGIN_SECONDS = 5.0
"""What systemd waits longer than the daemon's own watchdog, which is to be the first."""
_ECHO_SECONDS = 0.3
_SWITCH_SECONDS = 0.0005
"""A thread that tokenizes or renders a template holds up the streams no longer than this (Python's default: 5 ms)."""

logger = log.get_logger("daemon")


class ExitCode(enum.IntEnum):
    """What the daemon's exit status says. Those from 64 on are sysexits.h's."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    MODEL = 66
    LISTEN = 69
    ENGINE = 75
    ENGINE_AGAIN = 76
    CONFIG = 78


def exit_code(error: EdgedError) -> ExitCode:
    """The exit status of a daemon that ``error`` keeps from serving."""
    if isinstance(error, ListenError):
        return ExitCode.LISTEN
    if isinstance(error, (ConfigError, LedgerError)):
        return ExitCode.CONFIG
    if isinstance(error, CheckpointError):
        return ExitCode.MODEL
    # What came through the channel has lost its class and kept its code.
    by_code = {
        Code.FAILED_PRECONDITION: ExitCode.MODEL,
        Code.RESOURCE_EXHAUSTED: ExitCode.CONFIG,
        Code.UNIMPLEMENTED: ExitCode.CONFIG,
        Code.INVALID_ARGUMENT: ExitCode.CONFIG,
        Code.UNAVAILABLE: ExitCode.ENGINE,
    }
    return by_code.get(error.code, ExitCode.INTERNAL)


class Daemon:
    """One run of the daemon.

    Args:
        config: The configuration.
        ledger: Its static budget.
        notifier: To systemd.
        path: The configuration's file, for a reload.
    """

    def __init__(self, config: Config, ledger: Ledger, notifier: Notifier, path: Path) -> None:
        self._config = config
        self._path = path
        self._notifier = notifier
        self._supervisor = Supervisor(config, residency=plan_residency(config, ledger))
        self._server = Server(config, self._supervisor, ledger)
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
        self._signalled = -math.inf
        self._ready = False

    async def run(self) -> int:
        """Serve until a signal or the engine's failure ends it; return the exit status.

        Raises:
            EdgedError: Serving is not possible; everything that was started has been stopped.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # SIGHUP: the terminal was closed
            if number is signal.SIGHUP and self._notifier.active:
                loop.add_signal_handler(number, self._reload)
            elif signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1)
                loop.add_signal_handler(number, self._on_signal, number)
        self._server.claim()
        try:
            await self._server.start()
            logger.info("listening", addresses=list(self._server.addresses), version=__version__)
            self._supervisor.subscribe(self._on_state)
            self._supervisor.life.when_alive(self._notifier.alive)
            self._supervisor.life.when_patience_changes(self._expect_life)
            self._notifier.extend_timeout(self._load_patience)
            await self._supervisor.start()
            first = asyncio.create_task(self._signals.get())
            try:
                await self._serve_until(first)
            finally:
                first.cancel()
            return await self._drain() if first.done() else ExitCode.INTERNAL
        finally:
            self._supervisor.kill()
            await self._supervisor.stop(0.0)
            await self._server.stop()

    def _reload(self) -> None:
        """Read the configuration again and take over what a running daemon can; systemd hears both ends of it."""
        self._notifier.reloading("reading the configuration again")
        self._config, said = reload_config(self._path, self._config)
        names = ", ".join(model.name for model in self._config.models)
        parts = [f"{self._server.state.value.lower()} {names}", said, self._server.reload()]
        self._notifier.ready("; ".join(part for part in parts if part))

    def _on_signal(self, number: signal.Signals) -> None:
        """Note a signal, unless it is an echo of the last one: timeout(1) and shells signal a child and its group."""
        now = asyncio.get_running_loop().time()
        if now - self._signalled >= _ECHO_SECONDS:
            self._signalled = now
            self._signals.put_nowait(number)

    async def _serve_until(self, first_signal: asyncio.Task[signal.Signals]) -> None:
        """Load and serve until the signal comes.

        Raises:
            EdgedError: A model does not load, or the engine cannot be started any more.
        """
        loading = asyncio.create_task(self._server.load_models())
        failing = asyncio.create_task(self._supervisor.wait_for(State.FAILED))
        reporting = asyncio.create_task(self._report_progress())
        try:
            await asyncio.wait({first_signal, failing, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                self._on_state()
                await asyncio.wait({first_signal, failing}, return_when=asyncio.FIRST_COMPLETED)
            if failing.done() and self._supervisor.failure is not None:
                raise self._supervisor.failure
        finally:
            for task in (loading, failing, reporting):
                task.cancel()

    async def _drain(self) -> int:
        """Let running requests finish within the drain timeout, unless a second signal comes."""
        timeout = self._config.drain_timeout
        logger.info("draining", timeout_seconds=timeout)
        self._notifier.stopping(f"draining for at most {timeout:g} s")
        self._notifier.extend_timeout(timeout + _STOP_MARGIN_SECONDS)
        stopping = asyncio.create_task(self._stop_in_order(timeout))
        second = asyncio.create_task(self._signals.get())
        await asyncio.wait({stopping, second}, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            second.cancel()
            stopping.result()
            logger.info("stopped")
            return ExitCode.OK
        number = second.result()
        logger.warning("stopped by a second signal before the drain was over", signal=number.name)
        self._supervisor.kill()
        with suppress(asyncio.TimeoutError):
            # The clients whose requests are cut off are told so.
            await asyncio.wait_for(stopping, 1.0)
        return 128 + number

    async def _stop_in_order(self, timeout: float) -> None:
        await self._supervisor.stop(timeout)
        await self._server.stop()

    @property
    def _load_patience(self) -> float:
        """Seconds that systemd waits after the last progress of loading."""
        return self._config.watchdog.load_timeout + _WATCHDOG_MARGIN_SECONDS

    def _expect_life(self) -> None:
        """Tell systemd how soon the next sign of life is due: later where the engine loads, or sleeps while a GPU makes a step."""
        serving = self._server.state is State.SERVING
        step = self._config.step_timeout + _WATCHDOG_MARGIN_SECONDS
        patience = self._supervisor.life.patience + _WATCHDOG_MARGIN_SECONDS
        self._notifier.expect(patience if serving else max(step, self._load_patience))

    def _on_state(self, *_: object) -> None:
        """Tell systemd; READY once, when the first request would be served."""
        names = ", ".join(model.name for model in self._config.models)
        state = self._server.state
        self._expect_life()
        if state is State.SERVING:
            if not self._ready:
                self._ready = True
                # What is loaded now stays: the collector need not look at it again while tokens stream.
                gc.collect()
                gc.freeze()
                logger.info("serving", models=names)
                self._notifier.ready(f"serving {names}")
                asyncio.get_running_loop().call_later(STABLE_SECONDS, self._forget_crashes)
            else:
                self._notifier.status(f"serving {names}")
        elif state is State.RESTARTING:
            self._notifier.status(f"restarting the engine: {self._supervisor.last_error}")
        elif state is State.FAILED:
            self._notifier.status(f"failed: {self._supervisor.last_error}")

    def _forget_crashes(self) -> None:
        if self._server.state is State.SERVING:
            CrashRecord.from_environment().clear()

    async def _report_progress(self) -> None:
        """Tell systemd how far loading is, and ask for more time as long as it advances."""
        last: object = None
        while True:
            loading = dict(self._supervisor.loading)
            if loading and loading != last:
                last = loading
                parts = [
                    f"{name}: {now.what} {now.done / now.total:.0%}"
                    for name, now in loading.items()
                    if now.total
                ]
                self._notifier.status(f"loading {', '.join(parts)}")
                if not self._ready:
                    self._notifier.extend_timeout(self._load_patience)
            await asyncio.sleep(_PROGRESS_SECONDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    options = _parse(arguments)
    notifier = Notifier.from_environment()
    log.configure(process="daemon")
    try:
        config = read_config(options.config)
        log.configure(config.log.level, config.log.format, process="daemon")
        for model in config.models:
            choose_executor(model)
        ledger = plan_memory(config)
        if options.check:
            Listeners(config.listen).check()
            for model in config.models:
                check_folder(model.path, rope_scaling=model.rope_scaling)
            ServedModels(config).load()
            sys.stdout.write(_check_report(options.config, config, ledger))
            return ExitCode.OK
        give_way()
        sys.setswitchinterval(_SWITCH_SECONDS)
        return asyncio.run(Daemon(config, ledger, notifier, options.config).run())
    except EdgedError as error:
        code = exit_code(error)
        if code is ExitCode.ENGINE and CrashRecord.from_environment().note():
            code = ExitCode.ENGINE_AGAIN
        notifier.status(error.message)
        if options.check or sys.stderr.isatty():
            sys.stderr.write(f"edged: {error.message}\n")
        else:
            # No traceback: what was raised on purpose says all that helps.
            logger.error("cannot serve", reason=error.message, exit_status=int(code))  # noqa: TRY400
        return code
    except Exception:
        logger.exception("the daemon failed")
        return ExitCode.INTERNAL


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="edged",
        description="Serve language models over gRPC inside a static memory budget.",
        epilog=(
            "Exit status: 0 stopped after a drain; 1 internal fault; 2 wrong command line; 66 a model folder is refused; "
            "69 cannot listen; 75 the engine cannot be started; 76 the same twice within an hour under systemd; 78 the configuration is refused or does not fit its "
            "memory budget; 130 or 143 a second SIGINT or SIGTERM cut the drain short."
        ),
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the configuration (YAML)")
    parser.add_argument(
        "--check", action="store_true", help="check the configuration and its memory budget, then exit"
    )
    parser.add_argument("--version", action="version", version=f"edged {__version__}")
    return parser.parse_args(arguments)


def _check_report(path: Path, config: Config, ledger: Ledger) -> str:
    """What ``--check`` prints when nothing is wrong."""
    models = "1 model" if len(config.models) == 1 else f"{len(config.models)} models"
    return f"{path}: {models}, {format_size(ledger.total)} of {format_size(ledger.budget)}; nothing is wrong with it\n"


if __name__ == "__main__":
    sys.exit(main())
