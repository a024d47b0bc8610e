"""A Jetson's state as lines of ``edgectl status``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.cli.terminal import visible

if TYPE_CHECKING:
    from edged.v1 import control_pb2


def board_lines(board: control_pb2.BoardStatus) -> list[str]:
    """What a board says of itself, two or three lines."""
    name = board.module or board.model or "a Jetson"
    system = (
        f"L4T {board.l4t}" + (f" (JetPack {board.jetpack})" if board.jetpack else "") if board.l4t else ""
    )
    first = ", ".join(
        part for part in (name, system, f"mode {board.power_mode}" if board.power_mode else "") if part
    )
    lines = [f"board      {visible(first)}"]
    parts = []
    if board.temperatures:
        zone, celsius = max(board.temperatures.items(), key=lambda item: item[1])
        margin = f", {board.thermal_margin:.0f} below throttling" if board.HasField("thermal_margin") else ""
        parts.append(f"{celsius:.0f} °C at {visible(zone)}{margin}")
    if board.rails:
        parts.append(
            ", ".join(f"{visible(rail)} {watts:.1f} W" for rail, watts in sorted(board.rails.items()))
        )
    if "gpu" in board.clocks:
        parts.append(f"GPU {board.clocks['gpu'] / 1e6:.0f} MHz")
    events = sum(board.throttle_events.values())
    if events:
        parts.append(f"{events} over-current events since boot")
    if parts:
        lines.append(f"           {'; '.join(parts)}")
    return lines
