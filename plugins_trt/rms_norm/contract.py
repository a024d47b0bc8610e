"""What `rms_norm` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import KERNEL_DTYPES, DeviceArray, LaunchError, check_array


@dataclass(frozen=True)
class RmsNorm:
    """residual += scale * branch, when there is a branch; then out = weight * residual / rms(residual).

    The residual is rounded before it is normalized: what is stored is what was normalized.
    """

    residual: DeviceArray  # [T, hidden], updated when there is a branch
    weight: DeviceArray  # [hidden]
    out: DeviceArray  # [T, hidden]
    branch: DeviceArray | None = None  # [T, hidden]
    scale: float = 1.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("residual", self.residual, tuple(KERNEL_DTYPES), (None, None))
        rows, hidden = self.residual.shape
        if hidden % 8:
            raise LaunchError(f"residual: rows of {hidden} elements, must be a multiple of 8")
        check_array("weight", self.weight, self.residual.dtype, (hidden,))
        check_array("out", self.out, self.residual.dtype, (rows, hidden))
        if self.branch is not None:
            check_array("branch", self.branch, self.residual.dtype, (rows, hidden))
        if self.epsilon < 0:
            raise LaunchError(f"epsilon: {self.epsilon}, must not be negative")
