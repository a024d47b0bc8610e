"""The sizes that the kernels are built for."""

from __future__ import annotations

from plugins_trt.contract.arrays import LaunchError, check_at_least

BLOCK = 64
"""Tokens of a page, which is a block of sparse attention."""

KERNEL, STRIDE = 32, 16
"""Tokens averaged into a fine compressed key, and the distance of two."""

COARSE_KERNEL, COARSE_STRIDE = 128, 64
"""Tokens averaged into a coarse compressed key, and the distance of two."""

MAX_TREE = 64
"""Nodes of one sequence's tree: the bits of a mask word."""

MAX_DECODE = 64
"""Tokens of the largest bucket that the decode kernels take."""

HEAD_DIMS = (64, 128)
"""Elements of a head."""

MAX_GROUP = 16
"""Query heads that share a KV head."""


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuses a head layout the kernels have no tile for.

    Raises:
        LaunchError: naming `head_dim`, `kv_heads` or `heads`.
    """
    if head_dim not in HEAD_DIMS:
        raise LaunchError(f"head_dim: {head_dim}, must be one of {HEAD_DIMS}")
    check_at_least("kv_heads", kv_heads, 1)
    check_at_least("heads", heads, 1)
    if heads % kv_heads:
        raise LaunchError(f"heads: {heads}, must be a multiple of kv_heads {kv_heads}")
    if heads // kv_heads > MAX_GROUP:
        raise LaunchError(
            f"heads: {heads} over {kv_heads} KV heads is a group of {heads // kv_heads}, "
            f"at most {MAX_GROUP} query heads share a KV head"
        )
