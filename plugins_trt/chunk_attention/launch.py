"""Launches chunk attention on raw pointers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from plugins_trt.arena import Pool
from plugins_trt.chunk_attention.contract import DENSE_ROWS, ChunkAttention
from plugins_trt.chunk_selection.contract import bitmap_words, row_stride
from plugins_trt.contract import (
    BLOCK,
    KERNEL_DTYPES,
    Batch,
    LaunchError,
    ceil_div,
    kernel_suffix,
    softmax_scale,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_DENSE_ARGUMENTS = "PPPPqqiiiifi"
_SPARSE_ARGUMENTS = "PPPqqiiiifi"
_DENSE_THREADS, _SPARSE_THREADS = 128, 256
_WARPS = 8  # of a block of sparse attention
_LOG2E = 1.4426950408889634

# (warps a token, bytes of all rings) of the variants of the sparse kernel, as instantiated in sparse.cu; of those with
# a warp a token the first that fits is taken.
_SPARSE = {
    128: {
        "wide_1": (1, 8 * 3 * 32 * 256),
        "middle_1": (1, 8 * 4 * 16 * 256),
        "narrow_1": (1, 8 * 2 * 16 * 256),
        "split_4": (4, 8 * 3 * 16 * 256),
    },
    64: {
        "wide_1": (1, 8 * 4 * 32 * 128),
        "narrow_1": (1, 8 * 3 * 16 * 128),
        "split_4": (4, 8 * 3 * 32 * 128),
    },
}
# The same over keys and values in eight bits (sparse_quantized.cu): a slot of keys holds the scales of both, too.
_SPARSE_QUANTIZED = {
    128: {
        "wide_1": (1, 8 * 5 * 32 * 132),
        "narrow_1": (1, 8 * 5 * 16 * 132),
        "split_4": (4, 8 * 5 * 16 * 132),
    },
    64: {
        "wide_1": (1, 8 * 4 * 32 * 68),
        "split_4": (4, 8 * 3 * 32 * 68),
    },
}
_MAX_WORDS = 256  # of a bitmap: 8192 pages


class _Attention(ABC):
    """What the dense and the sparse launcher know of the device and the layout."""

    def __init__(
        self,
        function: Callable[[str, int], Any],
        *,
        multiprocessors: int,
        shared_bytes: int,
        dtype: str,
        head_dim: int,
        kv_dtype: str | None = None,
    ) -> None:
        """Finds the kernels.

        Args:
            function: finds a compiled kernel of this package by name and raises its limit of dynamic shared
                memory to the bytes given; what it returns launches as PyCUDA's functions do.
            multiprocessors: of the device.
            shared_bytes: of shared memory that a block may have.
            dtype: "float16" or "bfloat16".
            head_dim: 64 or 128.
            kv_dtype: the arena's.
        """
        self.multiprocessors = multiprocessors
        self.shared_bytes = shared_bytes
        self.head_dim = head_dim
        self.quantized = kv_dtype is not None
        self.layout = f"{kernel_suffix(dtype, kv_dtype)}_{head_dim}"
        self.exact_layout = f"{KERNEL_DTYPES[dtype]}_{head_dim}"
        self.pools = Batch.FORMAT + (4 if self.quantized else 2) * Pool.FORMAT
        self._prepare(function)

    @abstractmethod
    def _prepare(self, function: Callable[[str, int], Any]) -> None:
        """Finds the kernels of this kind, once the device is known."""


class DenseChunkAttention(_Attention):
    """Dense attention of the queries below `dense_below`."""

    def _prepare(self, function: Callable[[str, int], Any]) -> None:
        # Queries, then two pages of keys and values; or one as it is stored, in eight bits with scales, and widened.
        page = 2 * BLOCK * 2 * self.head_dim
        pages = page + 2 * BLOCK * (4 + self.head_dim + 2) if self.quantized else 2 * page
        self._shared = DENSE_ROWS * self.head_dim * 2 + pages
        layout = self.pools + _DENSE_ARGUMENTS
        self._whole = function(f"chunk_dense_{self.layout}", self._shared).prepare(layout)
        self._split = function(f"chunk_dense_split_{self.layout}", self._shared).prepare(layout)
        # (Reads no page: the same for all of them.)
        exact = Batch.FORMAT + 2 * Pool.FORMAT + _DENSE_ARGUMENTS
        self._combine = function(f"chunk_combine_{self.exact_layout}", 0).prepare(exact)

    def __call__(self, args: ChunkAttention, stream: Any = None) -> None:  # noqa: ANN401 -- PyCUDA is untyped
        """Enqueues dense attention.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        plan = args.dense_plan(self.multiprocessors)
        workspace = args.workspace.pointer if args.workspace is not None else 0
        arguments = (
            args.q.pointer,
            args.out.pointer,
            workspace,
            workspace + plan.parts_bytes,
            row_stride(args.q),
            row_stride(args.out),
            args.heads,
            args.arena.kv_heads,
            args.dense_below,
            plan.splits,
            softmax_scale(args.scale, args.arena.head_dim) * _LOG2E,
            0,
        )
        batch = args.batch.pack()
        kernel = self._whole if plan.splits == 1 else self._split
        kernel.prepared_async_call(
            (plan.tiles, args.arena.kv_heads, plan.splits),
            (_DENSE_THREADS, 1, 1),
            stream,
            *batch,
            *args.arena.pack_keys_values(args.layer),
            *arguments,
            shared_size=self._shared,
        )
        if plan.splits > 1:
            rows = _DENSE_THREADS // 32
            grid = (ceil_div(args.batch.tokens * args.heads, rows), 1, 1)
            pools = args.arena.pack(args.layer)[:6]
            block = (_DENSE_THREADS, 1, 1)
            self._combine.prepared_async_call(grid, block, stream, *batch, *pools, *arguments)


class SparseChunkAttention(_Attention):
    """Sparse attention of the queries from `dense_below` on."""

    def _prepare(self, function: Callable[[str, int], Any]) -> None:
        self._kernels = {}
        self._variants = (_SPARSE_QUANTIZED if self.quantized else _SPARSE)[self.head_dim]
        for variant, (split, rings) in self._variants.items():
            most = rings + (_WARPS // split + 1) * _MAX_WORDS * 4
            if most <= self.shared_bytes:
                name = f"chunk_sparse_{variant}_{self.layout}"
                self._kernels[variant] = function(name, most).prepare(self.pools + _SPARSE_ARGUMENTS)

    def __call__(
        self,
        args: ChunkAttention,
        stream: Any = None,  # noqa: ANN401
        variant: str | None = None,
    ) -> None:
        """Enqueues sparse attention.

        Args:
            args: with `chosen`.
            stream: None is the default stream.
            variant: of the kernel, for measurements; None takes the one that suits the bucket and the device.

        Raises:
            LaunchError: naming the argument, before anything runs.
        """
        if args.chosen is None:
            raise LaunchError("chosen: missing, sparse attention needs the bitmap of block selection")
        variant = self._variant(args) if variant is None else variant
        split, rings = self._variants[variant]
        tokens = _WARPS // split
        words = bitmap_words(args.batch.max_pages)
        packed = (
            *args.batch.pack(),
            *args.arena.pack_keys_values(args.layer),
            args.chosen.pointer,
            args.q.pointer,
            args.out.pointer,
            row_stride(args.q),
            row_stride(args.out),
            args.heads,
            args.arena.kv_heads,
            words,
            args.dense_below,
            softmax_scale(args.scale, args.arena.head_dim) * _LOG2E,
            0,
        )
        self._kernels[variant].prepared_async_call(
            (args.batch.tokens // tokens + args.batch.sequences + 1, args.arena.kv_heads, 1),
            (_SPARSE_THREADS, 1, 1),
            stream,
            *packed,
            shared_size=rings + (tokens + 1) * words * 4,
        )

    def _variant(self, args: ChunkAttention) -> str:
        """Several warps a token while a warp a token would leave multiprocessors idle."""
        if ceil_div(args.batch.tokens, _WARPS) * args.arena.kv_heads < self.multiprocessors:
            return "split_4"
        return next(variant for variant in self._kernels if variant != "split_4")
