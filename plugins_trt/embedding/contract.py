"""What `embedding` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import KERNEL_DTYPES, DeviceArray, LaunchError, check_array


@dataclass(frozen=True)
class Embedding:
    """out[t] = scale * table[ids[t]]; an id outside the table (padding carries -1) gives zeros."""

    ids: DeviceArray  # int32 [T]
    table: DeviceArray  # [vocabulary, hidden]
    out: DeviceArray  # [T, hidden]
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("ids", self.ids, "int32", (None,), alignment=4)
        check_array("table", self.table, tuple(KERNEL_DTYPES), (None, None))
        if self.table.shape[1] % 8:
            raise LaunchError(f"table: rows of {self.table.shape[1]} elements, must be a multiple of 8")
        check_array("out", self.out, self.table.dtype, (self.ids.shape[0], self.table.shape[1]))
