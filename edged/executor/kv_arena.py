"""Where the kernels find keys, values and compressed keys of every layer, from the addresses of a plan's buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.memory.cuda_buffers import UNREAD_COARSE, UNREAD_FINE
from edged.memory.specs import PAGE_TOKENS
from plugins_trt.arena import COARSE_SLOTS, FINE_SLOTS, Arena, Pool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.memory.buffers import ModelPlan


def arena_of(plan: ModelPlan, pointers: Mapping[str, int]) -> Arena:
    """The arena of a plan.

    Without a selection rule compressed keys have one place, which every page and head overwrites and nobody reads.

    Args:
        plan: The model's plan.
        pointers: Addresses of its buffers, by name.
    """
    a = plan.architecture

    def pool(name: str, slots: int, width: int = a.head_dim) -> Pool:
        head = slots * width
        return Pool(pointers[name], plan.pages * a.kv_heads * head, a.kv_heads * head, head)

    if plan.selection is None:
        fine, coarse = (Pool(pointers[name], 0, 0, 0) for name in (UNREAD_FINE, UNREAD_COARSE))
    else:
        fine, coarse = pool("fine", FINE_SLOTS), pool("coarse", COARSE_SLOTS)
    return Arena(
        a.layers,
        plan.pages,
        a.kv_heads,
        a.head_dim,
        plan.dtype,
        keys=pool("keys", PAGE_TOKENS),
        values=pool("values", PAGE_TOKENS),
        fine=fine,
        coarse=coarse,
        kv_dtype=plan.quantized_kv,
        key_scales=pool("key_scales", PAGE_TOKENS, 1) if plan.quantized_kv else None,
        value_scales=pool("value_scales", PAGE_TOKENS, 1) if plan.quantized_kv else None,
    )
