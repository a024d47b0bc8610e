"""edgectl: one module a command.

The modules of commands have no ``from __future__ import annotations``: Typer reads the annotations of a command when
the program runs, and so the linter sees that their imports are needed then.
"""
