"""What `sample` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import DeviceArray, LaunchError, check_array


@dataclass(frozen=True)
class Sample:
    """ids[r] is a token drawn from row r as `reference.sample` draws it; rows without a temperature are left alone."""

    logits: DeviceArray  # float32 [R, vocabulary]
    temperatures: DeviceArray  # float32 [R]
    top_ks: DeviceArray  # int32 [R], 0: all
    top_ps: DeviceArray  # float64 [R], above 0, up to 1
    numbers: DeviceArray  # float64 [R], in [0, 1)
    ids: DeviceArray  # int32 [R]

    def __post_init__(self) -> None:
        """Checks shapes and dtypes."""
        check_array("logits", self.logits, "float32", (None, None), alignment=4)
        rows, vocabulary = self.logits.shape
        if vocabulary < 1:
            raise LaunchError("logits: no column, must have one for each token")
        check_array("temperatures", self.temperatures, "float32", (rows,), alignment=4)
        check_array("top_ks", self.top_ks, "int32", (rows,), alignment=4)
        check_array("top_ps", self.top_ps, "float64", (rows,), alignment=8)
        check_array("numbers", self.numbers, "float64", (rows,), alignment=8)
        check_array("ids", self.ids, "int32", (rows,), alignment=4)
