"""Runs all tests: on this Python and, beside them with a lower priority, the torch-free ones on CPython 3.10.

Tests of daemons wait for processes and clocks, which leaves a part of the processor to the other run. What that one says is
shown when this Python's tests have ended; a failure of either is one of the whole.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def main() -> int:
    """Run both; return the first exit status that is not 0."""
    here = {"cwd": TESTS.parent, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    with tempfile.TemporaryFile() as said:
        # Not as a job of a shell, which would have it ignore SIGINT: some tests press Ctrl-C.
        oldest = subprocess.Popen(
            ["nice", "-n", "5", "bash", str(TESTS / "run_on_oldest_python.sh")],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            **here,
        )
        newest = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"],
            **here,
        )
        # Both hear a terminal's Ctrl-C themselves, and end in their own time.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = newest.wait()
        other = oldest.wait()
        said.seek(0)
        shutil.copyfileobj(said, sys.stdout.buffer)
    return status or other


if __name__ == "__main__":
    sys.exit(main())
