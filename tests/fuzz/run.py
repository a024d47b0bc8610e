"""Drives the readers with atheris (coverage-guided): `make fuzz`, or

    python tests/fuzz/run.py TARGET [--seconds N]

What makes a reader fail is written to tests/fuzz/found/TARGET/. Once the fault is mended, the file goes to
tests/fuzz/cases/TARGET/ under a name that says what it is, where the ordinary tests run it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).resolve().parent))

with atheris.instrument_imports(include=["edged"]):
    import readers

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "fuzz"


def main() -> None:
    """Fuzz one target for some time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=readers.TARGETS)
    parser.add_argument("--seconds", type=int, default=120, metavar="N", help="how long (default: 120)")
    options = parser.parse_args()
    readers.scratch()
    corpus, found = CACHE / options.target, HERE / "found" / options.target
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(readers.seeds(options.target)):
        (corpus / f"seed-{number}").write_bytes(content)
    cases = HERE / "cases" / options.target
    arguments = [
        sys.argv[0],
        str(corpus),
        *([str(cases)] if cases.is_dir() else []),
        f"-max_total_time={options.seconds}",
        f"-artifact_prefix={found}/",
        "-rss_limit_mb=2048",
        "-timeout=10",
        "-max_len=4096",
        "-print_final_stats=1",
    ]
    # libFuzzer ends the process by itself, so that a child fuzzes and this process clears up.
    child = os.fork()
    if child == 0:
        atheris.Setup(arguments, readers.TARGETS[options.target])
        atheris.Fuzz()
    _, status = os.waitpid(child, 0)
    readers.clean()
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
