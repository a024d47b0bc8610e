"""A look at the board, as a message of the public API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.v1 import control_pb2

if TYPE_CHECKING:
    from edged.jetson import Board


def board_status(board: Board) -> control_pb2.BoardStatus:
    """The message; what the board does not say is left out."""
    return control_pb2.BoardStatus(
        model=board.model,
        module=board.module,
        l4t=board.l4t,
        jetpack=board.jetpack,
        power_mode=board.power_mode,
        temperatures=board.temperatures,
        thermal_margin=board.thermal_margin,
        rails=board.rails,
        throttle_events=board.throttle_events,
        clocks=board.clocks,
        memory_total=board.memory_total or 0,
        memory_available=board.memory_available or 0,
        gpu_load=board.gpu_load,
        faults=[f"{fault.found}: {fault.remedy}" for fault in board.faults],
    )
