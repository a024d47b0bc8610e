"""What the kernels have no tile for, refused before anything is planned on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.errors import UnsupportedError
from edged.memory.specs import KV_NAMES, PAGE_TOKENS
from edged.models.cuda_weights import cuda_packed
from plugins_trt.chunk_selection.contract import MAX_PAGES
from plugins_trt.contract import LaunchError, check_heads
from plugins_trt.skinny_linear.contract import STEP

if TYPE_CHECKING:
    from edged.memory.buffers import ModelPlan

DTYPES = ("bfloat16", "float16")
"""Types of weights, activations and KV on a GPU."""

_OTHER_GROUPS = "quantize with edgectl quantize --group 64 (a GGUF file: import it without --keep-4bit), or "


def check_cuda_plan(name: str, plan: ModelPlan) -> None:
    """Refuse a model that the kernels do not run.

    Args:
        name: The model's, for messages.
        plan: Its plan.

    Raises:
        UnsupportedError: Names the key and what would do.
    """
    a = plan.architecture
    if plan.quantized_kv is None and plan.stored_kv != plan.dtype:
        raise UnsupportedError(
            f"model {name}: kv_dtype {KV_NAMES[plan.stored_kv]} with dtype {plan.dtype} does not run on device cuda: set "
            "kv_dtype to auto, int8 or fp8, or device to cpu",
            field="kv_dtype",
        )
    if plan.dtype not in DTYPES:
        raise UnsupportedError(
            f"model {name}: dtype {plan.dtype} does not run on device cuda: set dtype to {' or '.join(DTYPES)}",
            field="dtype",
        )
    _check_packed(name, plan)
    try:
        check_heads(a.heads, a.kv_heads, a.head_dim)
    except LaunchError as error:
        raise UnsupportedError(
            f"model {name} on device cuda: {error}; set device to cpu", field="device"
        ) from None
    for key, size, multiple in (("hidden_size", a.hidden, STEP), ("intermediate_size", a.intermediate, 8)):
        if size % multiple:
            raise UnsupportedError(
                f"model {name} on device cuda: {key} {size} is no multiple of {multiple}; set device to cpu",
                field="device",
            )
    if plan.selection is not None and plan.pages_per_sequence > MAX_PAGES:
        raise UnsupportedError(
            f"model {name}: context_length {plan.context_length} is more than sparse attention on device cuda compares: "
            f"set it to at most {MAX_PAGES * PAGE_TOKENS}, or attention to {{mode: dense}}",
            field="context_length",
        )


def _check_packed(name: str, plan: ModelPlan) -> None:
    """Refuse packed weights that the kernels do not take."""
    quantization = plan.architecture.quantization
    if quantization is None:
        return
    if quantization.act_order:
        raise UnsupportedError(
            f"model {name}: 4-bit weights whose groups are not consecutive inputs (quantization_config.desc_act) do not "
            "run on device cuda: quantize with edgectl quantize --act-order static, or set device to cpu",
            field="device",
        )
    for packed in cuda_packed(plan.architecture):
        try:
            packed.check()
        except LaunchError as error:
            kind, instead = ("ternary", "") if packed.ternary else ("4-bit", _OTHER_GROUPS)
            raise UnsupportedError(
                f"model {name}: the {kind} weight {packed.name} does not run on device cuda: {error}; {instead}set device "
                "to cpu",
                field="device",
            ) from None
