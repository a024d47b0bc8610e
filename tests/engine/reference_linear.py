"""`edged::W4A16Linear` and `edged::TernaryLinear` from the operators' references, for ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun

from plugins_trt.ternary_linear.reference import ternary_linear
from plugins_trt.w4a16_linear.reference import w4a16_linear


def _product(reference: Any, inputs: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[Any]:
    x, packed, scales = (torch.from_numpy(np.ascontiguousarray(each)) for each in inputs[:3])
    assert x.shape[1] == attributes["inputs_of_row"]
    assert len(inputs) == 3 + attributes["bias"]
    out = reference(
        x,
        packed,
        scales,
        outputs=attributes["outputs_of_row"] // (2 if attributes["gated"] else 1),
        bias=torch.from_numpy(inputs[3]) if attributes["bias"] else None,
        gated=bool(attributes["gated"]),
    )
    return (out.numpy().astype(inputs[0].dtype),)


class W4A16Linear(OpRun):
    op_domain = "edged"

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any]:
        return _product(w4a16_linear, inputs, attributes)


class TernaryLinear(OpRun):
    op_domain = "edged"

    def _run(self, *inputs: Any, **attributes: Any) -> tuple[Any]:
        return _product(ternary_linear, inputs, attributes)
