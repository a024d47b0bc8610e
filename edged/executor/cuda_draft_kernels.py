"""The operators of a draft model on a GPU that its target has not, or has for other heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edged.memory.cuda_draft import draft_packed
from plugins_trt.append.launch import Appender
from plugins_trt.decode_attention.launch import DecodeAttender
from plugins_trt.draft_input.launch import DraftInputWriter
from plugins_trt.draft_take.launch import DraftTaker
from plugins_trt.draft_tree.launch import TreeGrower
from plugins_trt.w4a16_linear.launch import W4A16Multiplier

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.memory.buffers import ModelPlan
    from plugins_trt.append.contract import Append
    from plugins_trt.decode_attention.contract import DecodeAttention
    from plugins_trt.draft_input.contract import DraftInput
    from plugins_trt.draft_take.contract import DraftTake
    from plugins_trt.draft_tree.contract import DraftGrow, DraftTop
    from plugins_trt.registry import Kernels


@dataclass(frozen=True)
class DraftKernels:
    """The operators of one draft; a call enqueues one on the device's stream."""

    rows: Callable[[DraftInput], None]
    append: Callable[[Append], None]
    attend: Callable[[DecodeAttention], None]
    top: Callable[[DraftTop], None]
    grow: Callable[[DraftGrow], None]
    take: Callable[[DraftTake], None]
    packed: Callable[[Any], None]
    """Products with weights in 4 bits, where it has any."""


def load_draft_kernels(kernels: Kernels, plan: ModelPlan, stream: Any) -> DraftKernels:  # noqa: ANN401 - PyCUDA's
    """Load those of a plan's draft.

    Raises:
        KernelsError: No compiled kernels suit the device.
    """
    assert plan.draft is not None, "asked of a plan with a draft"  # noqa: S101
    a, dtype = plan.draft.eagle.layer, plan.dtype
    write = DraftInputWriter(kernels.operator("draft_input"), dtype=dtype)
    append = Appender(kernels.operator("append"), dtype=dtype, head_dim=a.head_dim)
    attend = DecodeAttender(
        kernels.operator("decode_attention"),
        multiprocessors=kernels.multiprocessors,
        shared_bytes=kernels.shared_bytes,
        dtype=dtype,
        head_dim=a.head_dim,
    )
    grower = TreeGrower(kernels.operator("draft_tree"))
    take = DraftTaker(kernels.operator("draft_take"))
    packed: Any = _absent
    if draft_packed(plan.draft):
        packed = W4A16Multiplier(
            kernels.operator("w4a16_linear"),
            multiprocessors=kernels.multiprocessors,
            shared_bytes=kernels.shared_bytes,
            dtype=dtype,
        )
    return DraftKernels(
        rows=lambda args: write(args, stream),
        append=lambda args: append(args, stream),
        attend=lambda args: attend(args, stream),
        top=lambda args: grower.top(args, stream),
        grow=lambda args: grower.grow(args, stream),
        take=lambda args: take(args, stream),
        packed=lambda args: packed(args, stream),
    )


def _absent(*_: object) -> None:
    raise AssertionError("a draft without packed weights has no such product")
