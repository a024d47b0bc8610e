"""What `argmax` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import KERNEL_DTYPES, DeviceArray, LaunchError, check_array

DTYPES = {"float32": "f32", **KERNEL_DTYPES}


@dataclass(frozen=True)
class Argmax:
    """ids[r] is the place of row r's largest logit, the smaller of equal ones; NaN never wins."""

    logits: DeviceArray  # [R, vocabulary], rows may lie apart
    ids: DeviceArray  # int32 [R]

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        if len(self.logits.shape) != 2:
            raise LaunchError(f"logits: shape {self.logits.shape}, must be (rows, vocabulary)")
        strides = self.logits.strides
        row = DeviceArray(
            self.logits.pointer,
            self.logits.dtype,
            self.logits.shape[1:],
            None if strides is None else strides[1:],
        )
        check_array("logits", row, tuple(DTYPES), (None,), alignment=4)
        check_array("ids", self.ids, "int32", (self.logits.shape[0],), alignment=4)

    @property
    def row_stride(self) -> int:
        """Elements from a row to the next."""
        return self.logits.shape[1] if self.logits.strides is None else self.logits.strides[0]
