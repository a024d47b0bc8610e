"""What `sample` takes, and its refusals."""

from __future__ import annotations

from dataclasses import dataclass

from plugins_trt.contract import DeviceArray, LaunchError, check_array
from plugins_trt.sample.rows import LOGPROB_WORDS, ROW_WORDS, mask_words

WORKSPACE = 54296
"""Bytes of scratch memory of a row."""


@dataclass(frozen=True)
class Options:
    """What rows have beyond temperature, top_k and top_p; :class:`plugins_trt.sample.rows.RowWriter` writes it."""

    rows: DeviceArray  # int32 [R, ROW_WORDS]
    entries: DeviceArray  # int32 [E, 2]
    raw: DeviceArray  # float32 [E], scratch memory
    masks: DeviceArray  # int32 [M, mask_words(vocabulary)]
    logprobs: DeviceArray  # int32 [R, LOGPROB_WORDS], of the rows that ask for them


@dataclass(frozen=True)
class Sample:
    """ids[r] is a token drawn from row r as `reference` draws it, -1 where all are forbidden.

    Rows without a temperature and without options are left alone. The logits of rows with options are changed.
    """

    logits: DeviceArray  # float32 [R, vocabulary]
    temperatures: DeviceArray  # float32 [R]
    top_ks: DeviceArray  # int32 [R], 0: all
    top_ps: DeviceArray  # float64 [R], above 0, up to 1
    numbers: DeviceArray  # float64 [R], in [0, 1)
    ids: DeviceArray  # int32 [R]
    workspace: DeviceArray  # uint8 [R * WORKSPACE or more], zeros before the first launch
    options: Options | None = None
    largest_known: bool = False
    """Whether ids holds each row's largest logit's id already, which saves a look at every logit."""

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
        check_array("workspace", self.workspace, "uint8", (None,), alignment=8)
        if self.workspace.shape[0] < rows * WORKSPACE:
            raise LaunchError(
                f"workspace: {self.workspace.shape[0]} bytes, {rows} rows need {rows * WORKSPACE}"
            )
        options = self.options
        if options is not None:
            check_array("options.rows", options.rows, "int32", (rows, ROW_WORDS), alignment=8)
            check_array("options.entries", options.entries, "int32", (None, 2), alignment=8)
            check_array("options.raw", options.raw, "float32", (options.entries.shape[0],), alignment=4)
            check_array("options.masks", options.masks, "int32", (None, mask_words(vocabulary)), alignment=4)
            check_array("options.logprobs", options.logprobs, "int32", (rows, LOGPROB_WORDS), alignment=8)
