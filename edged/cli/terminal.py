"""What reaches the terminal: plain text when it is none, and no control characters from a model when it is one."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

_WIDE = 10_000
"""Columns when the output is no terminal: nothing may be cut or wrapped in a pipe or a file."""

# C0 and C1 controls but tab and newline: a model's text must not move the cursor, set the title or answer queries.
_CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def prepare_streams() -> None:
    """Make the three streams usable whatever started this process.

    A stream that was closed reads and writes nothing, and characters that the terminal's encoding lacks become ``?``.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def console(stream: TextIO | None = None) -> Console:
    """A console for tables; on standard output by default. Text is taken literally, never as markup."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def show(*parts: RenderableType) -> None:
    """Print tables and lines to standard output; elsewhere than on a terminal without the spaces that fill them."""
    out = console()
    if out.is_terminal:
        out.print(*parts, sep="\n")
        return
    with out.capture() as captured:
        out.print(*parts, sep="\n")
    sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def write_text(text: str) -> None:
    """Write a model's text at once."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def visible(text: str) -> str:
    """Text with control characters made visible; tabs and newlines stay."""
    return text.translate(_CONTROLS)


def say_error(message: str) -> None:
    """One message on standard error."""
    sys.stderr.write(f"edgectl: {visible(message)}\n")
    sys.stderr.flush()


def note(message: str) -> None:
    """A line on standard error beside the output, dim on a terminal."""
    write_beside(message + "\n")


def write_beside(text: str) -> None:
    """Text on standard error beside the output, at once; dim on a terminal."""
    style = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    shown, end = (visible(text[:-1]), "\n") if text.endswith("\n") else (visible(text), "")
    sys.stderr.write(f"\x1b[2m{shown}\x1b[0m{end}" if style else shown + end)
    sys.stderr.flush()


def detach_stdout() -> None:
    """Point standard output at nothing: its reader is gone, and the interpreter flushes it once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
