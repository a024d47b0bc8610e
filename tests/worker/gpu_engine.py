"""An engine process with the real executor and letters for texts: `gpu_engine.py --fd N --parent PID`.

For machines that lack what reads tokenizers' tables; a token's text plays no part in what is tried there.
"""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fake_engine import Letters

from edged.parent_death import die_with_parent
from edged.worker.engine import serve


def main():
    fd, parent = int(sys.argv[2]), int(sys.argv[4])
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    sys.exit(serve(socket.socket(fileno=fd), texts_of=lambda _: Letters()))


if __name__ == "__main__":
    main()
