"""SIGHUP under systemd: the configuration is read again, and what a running daemon can change is changed.

What can be: ``log.level`` of the daemon, ``drain_timeout``. Certificates and token files are looked at by themselves
(:mod:`edged.server.certificates`, :mod:`edged.server.tokens`). Everything else holds memory or sockets and needs a
restart; the answer names those keys.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from edged import log
from edged.config_reader import read_config
from edged.errors import EdgedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from edged.config import Config

LIVE = frozenset({"log.level", "log.format", "drain_timeout"})
"""Keys that a reload takes over."""

logger = log.get_logger("daemon")


def reload_config(path: Path, running: Config) -> tuple[Config, str]:
    """Read the file again.

    Args:
        path: The configuration.
        running: What the daemon runs with.

    Returns:
        The configuration from now on, and one line on what came of it. A refused file changes nothing.
    """
    try:
        found = read_config(path)
    except EdgedError as error:
        logger.error("the reload is refused, nothing has changed", reason=error.message)  # noqa: TRY400
        return running, f"reload refused: {error.message}"
    changed = sorted(set(_differences(running, found, "")))
    waiting = [key for key in changed if key not in LIVE]
    config = dataclasses.replace(running, log=found.log, drain_timeout=found.drain_timeout)
    log.configure(config.log.level, config.log.format, process="daemon")
    logger.info("configuration read again", changed=changed, need_restart=waiting)
    if waiting:
        return config, f"reloaded; a restart is needed for {', '.join(waiting)}"
    return config, f"reloaded: {', '.join(changed) or 'nothing has changed'}"


def _differences(left: Any, right: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - values of the configuration
    """The path of every key that differs."""
    if type(left) is type(right) and dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            place = f"{path}.{field.name}" if path else field.name
            yield from _differences(getattr(left, field.name), getattr(right, field.name), place)
    elif isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        for index, pair in enumerate(zip(left, right, strict=True)):
            yield from _differences(*pair, f"{path}[{index}]")
    elif left != right:
        yield path
