"""One daemon of the fake model that every attack of a module shares: each test must leave it serving."""

from __future__ import annotations

import json

import pytest
from attacked import Target
from fixtures.daemon import FAKE_MODEL_DAEMON, DaemonProcess, demo_configuration


@pytest.fixture(scope="module")
def target(demo_model):
    daemon = DaemonProcess(
        demo_configuration(
            demo_model, listen={"tcp": "127.0.0.1:0"}, log={"level": "info", "format": "json"}
        ),
        # The product's ten seconds for a handshake would be ten seconds of waiting here.
        {"FAKE_ENGINE": json.dumps({}), "FAKE_HANDSHAKE": "2000"},
        (str(FAKE_MODEL_DAEMON),),
        forked=True,
    )
    try:
        daemon.wait_ready()
        yield Target(daemon)
        assert daemon.stop() == 0, daemon.log()[-3000:]
        assert "Traceback" not in daemon.log()
    finally:
        daemon.close()
