"""The forms of the wide kernel, and which of them suits a bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from plugins_trt.contract import BLOCK
from plugins_trt.decode_attention.contract import WIDE_ROWS
from plugins_trt.packed.wide import has_kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugins_trt.contract import Bucket
    from plugins_trt.decode_attention.contract import AttentionPlan


class Form(NamedTuple):
    """How a form of the wide kernel was instantiated in wide.cu or wide_groups.cu, and what suits that form."""

    name: str
    rows: int  # of a tile
    threads: int  # of a thread block
    pages: int  # that a thread block has in shared memory
    least_pages: int  # that a thread block takes at least

    def shared_bytes(self, head_dim: int) -> int:
        """Of a thread block: queries, and pages of keys and values."""
        return (self.rows + self.pages * 2 * BLOCK) * 2 * head_dim


SINGLE = Form("wide", WIDE_ROWS, 128, 2, 2)
GROUPS = Form("wide_low", 64, 256, 4, 2)
"""By warpgroups, where the device has them."""


class WideLauncher:
    """The forms that a device has, of one dtype and head_dim."""

    def __init__(
        self,
        function: Callable[[str, int], Any],
        stored: str,
        arguments: str,
        *,
        head_dim: int,
        quantized: bool,
        shared_bytes: int,
    ) -> None:
        """Finds them with `function` (see `registry.Kernels.operator`); `stored` ends their names."""
        # Over eight bits a thread block has one page as it is stored, with scales, and one that is widened.
        of_quantized = (WIDE_ROWS + 2 * BLOCK) * 2 * head_dim + 2 * BLOCK * (4 + head_dim + 2)
        shared = of_quantized if quantized else SINGLE.shared_bytes(head_dim)
        self._kernels = {
            SINGLE: (function(f"wide_{stored}", shared).prepare(arguments, overlaps=True), shared)
        }
        shared = GROUPS.shared_bytes(head_dim)
        if not quantized and shared <= shared_bytes and has_kernel(function, f"{GROUPS.name}_{stored}"):
            kernel = function(f"{GROUPS.name}_{stored}", shared).prepare(arguments, overlaps=True)
            self._kernels[GROUPS] = kernel, shared

    def form_of(
        self, bucket: Bucket, plan: AttentionPlan, *, dense: bool, shares: bool
    ) -> tuple[Form, AttentionPlan]:
        """The form that takes a bucket, and how it is cut then.

        Args:
            bucket: The bucket.
            plan: How it is cut for a form that every device has.
            dense: Every query is.
            shares: Sparse queries share blocks.
        """
        shares = shares and plan.shared_parts > 0
        if not (dense or shares) or not plan.wide_tiles or GROUPS not in self._kernels:
            return SINGLE, replace(plan, shared_parts=0)
        return GROUPS, plan.of_tiles(bucket, GROUPS.rows)

    def __call__(
        self,
        form: Form,
        plan: AttentionPlan,
        kv_heads: int,
        stream: Any,  # noqa: ANN401
        packed: tuple[float, ...],
    ) -> None:
        """Enqueues it."""
        kernel, shared = self._kernels[form]
        grid = (max(plan.wide_parts, plan.shared_parts), plan.wide_tiles, kv_heads)
        kernel.prepared_async_call(grid, (form.threads, 1, 1), stream, *packed, shared_size=shared)
