"""What `silu_mul` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import KERNEL_DTYPES, DeviceArray, LaunchError, check_array, check_rows


@dataclass(frozen=True)
class SiluMul:
    """out = silu(gate) * up; gate and up may be the halves of a fused projection's output."""

    gate: DeviceArray  # [T, size]
    up: DeviceArray  # [T, size]
    out: DeviceArray  # [T, size]

    def __post_init__(self) -> None:
        """Checks shapes, dtypes and that both inputs have the same distance of rows."""
        check_array("out", self.out, tuple(KERNEL_DTYPES), (None, None))
        if self.out.shape[1] % 8:
            raise LaunchError(f"out: rows of {self.out.shape[1]} elements, must be a multiple of 8")
        check_rows("gate", self.gate, self.out.dtype, self.out.shape)
        if check_rows("up", self.up, self.out.dtype, self.out.shape) != self.row_stride:
            raise LaunchError(f"up: strides {self.up.strides}, must be gate's {self.gate.strides}")

    @property
    def row_stride(self) -> int:
        """Elements from a row of the inputs to the next."""
        return check_rows("gate", self.gate, self.out.dtype, self.out.shape)
