"""Kernels around an engine in numpy, for one sequence and dense attention: enough to serve, and no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensorrt_stand_in import view

from edged.executor.tensorrt_device import EngineKernels


def _of(array: Any) -> Any:
    """A copy of the memory, whatever its strides."""
    strides = array.strides or array.contiguous_strides
    extent = 1 + sum((size - 1) * stride for size, stride in zip(array.shape, strides, strict=True))
    flat = view(array.pointer, array.dtype, (extent,))
    return np.lib.stride_tricks.as_strided(
        flat, array.shape, [stride * flat.itemsize for stride in strides]
    ).copy()


def _rotated(x: Any, cosine: Any, sine: Any) -> Any:
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _attend(args: Any, _: Any) -> None:
    arena, batch = args.arena, args.batch
    starts, (length, *_rest) = _of(batch.sequence_starts), _of(batch.lengths)
    table, positions = _of(batch.page_tables)[0], _of(batch.positions)
    count, size = int(starts[1]), arena.head_dim
    shape = (arena.pages, arena.kv_heads, 64, size)
    pools = [
        view(pool.pointer + args.layer * pool.layer_stride * 2, arena.dtype, shape)
        for pool in (arena.keys, arena.values)
    ]
    q, k, v = (_of(each)[:count].astype(np.float32) for each in (args.q, args.k, args.v))
    norms = [None if each is None else _of(each).astype(np.float32) for each in (args.q_norm, args.k_norm)]
    if norms[0] is not None:
        q, k = (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + args.epsilon) * norm
            for x, norm in zip((q, k), norms, strict=True)
        )
    cosine, sine = (_of(each)[positions[:count], None] for each in (args.cosine, args.sine))
    q, k = _rotated(q, cosine, sine), _rotated(k, cosine, sine)
    for row in range(count):
        slot = int(length) + row
        for pool, new in zip(pools, (k, v), strict=True):
            pool[table[slot // 64], :, slot % 64] = new[row]
    out = view(args.out.pointer, args.out.dtype, args.out.shape)
    out[:] = 0
    if count == 0:
        return
    stored = int(length) + count
    keys, values = (
        np.concatenate([pool[page] for page in table[: -(-stored // 64)]], axis=1)[:, :stored].astype(
            np.float32
        )
        for pool in pools
    )
    group = q.shape[1] // arena.kv_heads
    for row in range(count):
        seen = int(positions[row]) + 1
        for head in range(q.shape[1]):
            scores = keys[head // group, :seen] @ q[row, head] / size**0.5
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[head // group, :seen] / weights.sum()


def _argmax(args: Any) -> None:
    view(args.ids.pointer, "int32", args.ids.shape)[:] = _of(args.logits).argmax(1)


def _sample(args: Any) -> None:
    assert not _of(args.temperatures).any()


def kernels(_: Any) -> EngineKernels:
    return EngineKernels(attend=_attend, multiply=None, argmax=_argmax, sample=_sample)
