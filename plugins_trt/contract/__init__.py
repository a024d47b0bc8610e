"""What every operator's arguments share: device arrays, the ragged batch, the selection's scalars and their checks.

A refused argument raises `LaunchError`, whose message names the argument, before anything runs on the device.
Nothing here touches the device or imports torch: arguments are raw pointers with their shapes beside them.
"""

from __future__ import annotations

from plugins_trt.contract.arrays import (
    ELEMENT_BYTES,
    KERNEL_DTYPES,
    QUANTIZED_KV,
    DeviceArray,
    LaunchError,
    Tensor,
    ceil_div,
    check_array,
    check_at_least,
    check_rows,
    check_workspace,
    kernel_suffix,
    round_up,
)
from plugins_trt.contract.attention import Bucket, QueryArguments, softmax_scale
from plugins_trt.contract.batch import Batch, check_batch_values
from plugins_trt.contract.rule import SelectionRule
from plugins_trt.contract.sizes import (
    BLOCK,
    COARSE_KERNEL,
    COARSE_STRIDE,
    HEAD_DIMS,
    KERNEL,
    MAX_DECODE,
    MAX_GROUP,
    MAX_TREE,
    STRIDE,
    check_heads,
)

__all__ = [
    "BLOCK",
    "COARSE_KERNEL",
    "COARSE_STRIDE",
    "ELEMENT_BYTES",
    "HEAD_DIMS",
    "KERNEL",
    "KERNEL_DTYPES",
    "MAX_DECODE",
    "MAX_GROUP",
    "MAX_TREE",
    "QUANTIZED_KV",
    "STRIDE",
    "Batch",
    "Bucket",
    "DeviceArray",
    "LaunchError",
    "QueryArguments",
    "SelectionRule",
    "Tensor",
    "ceil_div",
    "check_array",
    "check_at_least",
    "check_batch_values",
    "check_heads",
    "check_rows",
    "check_workspace",
    "kernel_suffix",
    "round_up",
    "softmax_scale",
]
