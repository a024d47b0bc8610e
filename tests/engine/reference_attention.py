"""`edged::Attention` in numpy, one query at a time, for ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

PAGE = 64


class Pages:
    """Keys and values of every layer; the running test's are in `current`, where the operator finds them."""

    current: Pages

    def __init__(self, layers: int, pages: int, kv_heads: int, head_dim: int) -> None:
        shape = (layers, pages, PAGE, kv_heads, head_dim)
        # What was never stored must never be read.
        self.keys = np.full(shape, np.nan, np.float32)
        self.values = np.full(shape, np.nan, np.float32)
        Pages.current = self


def _norm(x: Any, weight: Any, epsilon: float) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _rotate(x: Any, cosine: Any, sine: Any) -> Any:
    """`[T, heads, D]` by `[T, D / 2]`."""
    first, second = np.split(x, 2, axis=-1)
    cosine, sine = cosine[:, None, :], sine[:, None, :]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


class Attention(OpRun):
    op_domain = "edged"

    def _run(  # noqa: PLR0917 - ONNX hands inputs over by position
        self,
        qkv: Any,
        positions: Any,
        sequence_starts: Any,
        lengths: Any,
        page_tables: Any,
        tree_masks: Any,
        cosine: Any,
        sine: Any,
        q_norm: Any = None,
        k_norm: Any = None,
        **attributes: Any,
    ) -> tuple[Any]:
        heads, kv_heads, dim = (attributes[name] for name in ("heads", "kv_heads", "head_dim"))
        tokens = qkv.shape[0]
        q, k, v = np.split(qkv.reshape(tokens, -1, dim), [heads, heads + kv_heads], axis=1)
        if attributes["qk_norm"]:
            q = _norm(q, q_norm, attributes["epsilon"])
            k = _norm(k, k_norm, attributes["epsilon"])
        q = _rotate(q, cosine[positions], sine[positions])
        k = _rotate(k, cosine[positions], sine[positions])
        keys = Pages.current.keys[attributes["layer"]]
        values = Pages.current.values[attributes["layer"]]
        out = np.zeros((tokens, heads, dim), np.float32)
        for sequence, length in enumerate(lengths):
            start, end = sequence_starts[sequence], sequence_starts[sequence + 1]
            table = page_tables[sequence]
            for token in range(start, end):
                slot = length + token - start
                keys[table[slot // PAGE], slot % PAGE] = k[token]
                values[table[slot // PAGE], slot % PAGE] = v[token]
            slots = np.arange(length + end - start)
            seen_keys, seen_values = (x[table[slots // PAGE], slots % PAGE] for x in (keys, values))
            for token in range(start, end):
                mask = int(tree_masks[token].view(np.uint64)[0])
                # Stored tokens, and of the step's own those that the mask names (a chain's names all up to itself;
                # chunks longer than a mask word are chains).
                own = np.arange(end - start)
                named = own <= token - start
                if end - start <= 64:
                    named = np.array([bool(mask >> int(node) & 1) for node in own])
                visible = np.concatenate([np.ones(length, bool), named])
                for head in range(heads):
                    group = head // (heads // kv_heads)
                    scores = seen_keys[visible, group] @ q[token, head] / np.sqrt(dim)
                    weights = np.exp(scores - scores.max())
                    out[token, head] = weights @ seen_values[visible, group] / weights.sum()
        return (out.reshape(tokens, -1),)
