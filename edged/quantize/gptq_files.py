"""A 4-bit linear as tensors of a GPTQ checkpoint, and the ``quantization_config`` beside them.

The layout is AutoGPTQ's, which GPTQModel, optimum, vLLM and edged read (:mod:`edged.checkpoint.gptq` describes it). Zero
points are 1 to 15 and stored less one, so that no reader meets the first format's ambiguous 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from edged import __version__
from edged.checkpoint.packed import pack_words
from edged.checkpoint.safetensors_header import TensorSpec
from edged.quantize.recipe import FREE, PLAIN, RTN, WORD

if TYPE_CHECKING:
    from edged.models.weights import WeightSource
    from edged.quantize.gptq import QuantizedWeight
    from edged.quantize.recipe import Recipe
    from edged.quantize.state import Results


def module_specs(module: str, outputs: int, inputs: int, group: int) -> list[TensorSpec]:
    """The tensors that a module becomes."""
    groups = inputs // group
    return [
        TensorSpec(f"{module}.qweight", "I32", (inputs // WORD, outputs)),
        TensorSpec(f"{module}.qzeros", "I32", (groups, outputs // WORD)),
        TensorSpec(f"{module}.scales", "F16", (groups, outputs)),
        TensorSpec(f"{module}.g_idx", "I32", (inputs,)),
    ]


def module_tensors(source: WeightSource, weight: QuantizedWeight) -> Results:
    """The tensors of one module, which has some rows of a weight."""
    rows = slice(source.start, source.start + source.shape[0])
    numbers = weight.numbers[rows].cpu().numpy()  # [n, K]
    scales = weight.grid.scales[rows].cpu().numpy().astype(np.float16)  # [n, groups]
    zeros = weight.grid.zeros[rows].cpu().numpy().astype(np.uint8)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "qweight": pack_words(numbers).T.view(np.int32),
        "qzeros": pack_words(np.ascontiguousarray(zeros.T - np.uint8(1))).view(np.int32),
        "scales": scales.T,
        "g_idx": weight.groups.cpu().numpy().astype(np.int32),
    }
    types = {"scales": "F16"}
    return {
        f"{source.module}.{part}": (types.get(part, "I32"), np.ascontiguousarray(array))
        for part, array in arrays.items()
    }


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``."""
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": recipe.group or -1,
        "desc_act": recipe.calibrated and recipe.act_order == FREE,
        "static_groups": recipe.calibrated and recipe.act_order not in (FREE, PLAIN),
        "sym": recipe.symmetric,
        "damp_percent": recipe.damping,
        "true_sequential": recipe.method != RTN,
        "lm_head": recipe.head,
        "checkpoint_format": "gptq",
        "meta": {
            "quantizer": [f"edged:{__version__}"],
            "method": recipe.method,
            "skipped_positions": recipe.skipped,
        },
    }
