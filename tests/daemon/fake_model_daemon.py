"""The daemon around the engine of `tests/worker/fake_engine.py`, whose model is as fast as one wants it.

Run as `python fake_model_daemon.py --config FILE`; the settings of the model are JSON in FAKE_ENGINE. With
FAKE_DAEMON_PATIENT it starts its engine again however often that is killed, with FAKE_OFF_HOST it takes loopback for an address
of the network, FAKE_HANDSHAKE is the time in milliseconds that a connection has for its handshake, FAKE_THERMAL_MARGIN the file
that says by how many degrees the board is below throttling.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from edged import daemon
from edged.jetson import Board
from edged.server import listeners, server, thermal
from edged.worker import restarts
from edged.worker.supervisor import Supervisor

ENGINE = Path(__file__).resolve().parent.parent / "worker" / "fake_engine.py"

daemon.choose_executor = lambda _model: "fake"  # which needs no torch
daemon.Supervisor = functools.partial(
    Supervisor, command=(sys.executable, str(ENGINE), os.environ["FAKE_ENGINE"])
)
if "FAKE_DAEMON_PATIENT" in os.environ:
    restarts.DELAYS = (0.0,) * 1000
    restarts.WINDOW_RESTARTS = 1000
if "FAKE_OFF_HOST" in os.environ:
    listeners.is_loopback = lambda _host: False
if "FAKE_HANDSHAKE" in os.environ:
    server._HANDSHAKE_MILLISECONDS = int(os.environ["FAKE_HANDSHAKE"])
if "FAKE_THERMAL_MARGIN" in os.environ:
    margin = Path(os.environ["FAKE_THERMAL_MARGIN"])
    thermal.is_jetson = lambda: True
    thermal.read_board = lambda: Board(thermal_margin=float(margin.read_text()))
sys.exit(daemon.main())
