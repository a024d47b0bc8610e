"""`edged::Attention` from the operators' own references, for ONNX's reference evaluator."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun

from plugins_trt.append import reference as append_reference
from plugins_trt.append.reference import Pages
from plugins_trt.decode_attention.reference import attend
from plugins_trt.decode_selection.reference import block_scores, choose
from plugins_trt.tensorrt.attention_plugin import AttentionOperator


class LayerPages:
    """The pages of every layer; the running test's are in `current`, where the operator finds them."""

    current: LayerPages

    def __init__(self, layers: int, pages: int, kv_heads: int, head_dim: int) -> None:
        # What was never stored must never be read.
        self.layers = [
            Pages(*(torch.full((pages, kv_heads, slots, head_dim), torch.nan) for slots in (64, 64, 4, 1)))
            for _ in range(layers)
        ]
        LayerPages.current = self


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
        pages = LayerPages.current.layers[attributes["layer"]]
        tokens = qkv.shape[0]
        q, k, v = torch.from_numpy(qkv).view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        table = torch.from_numpy(page_tables)
        masks = [int(word) for word in np.ascontiguousarray(tree_masks).view(np.uint64)[:, 0]]
        # A session says whether a step verifies a tree; here, masks that are no chain's do.
        starts, stored = [int(each) for each in sequence_starts], [int(each) for each in lengths]
        is_tree = any(
            masks[row] != (2 << (row - start)) - 1
            for start, end in itertools.pairwise(starts)
            for row in range(start, min(end, start + 64))
        )
        appended = append_reference.append(
            pages,
            q,
            k,
            v,
            sequence_starts=starts,
            lengths=stored,
            page_tables=table,
            positions=torch.from_numpy(positions),
            cosine=torch.from_numpy(cosine),
            sine=torch.from_numpy(sine),
            q_norm=None if q_norm is None else torch.from_numpy(q_norm),
            k_norm=None if k_norm is None else torch.from_numpy(k_norm),
            epsilon=attributes["epsilon"],
            tree_masks=masks if is_tree else None,
        )
        rule = _rule(attributes)
        out = torch.zeros(tokens, heads, dim)
        for sequence, length in enumerate(stored):
            for token in range(starts[sequence], starts[sequence + 1]):
                q_row, position = appended.q[token], int(positions[token])
                mask = masks[token] if is_tree else None
                chosen = None
                if rule is not None and position + 1 >= rule.dense_below:
                    scores = block_scores(
                        pages,
                        q_row,
                        table[sequence],
                        length=length,
                        position=position,
                        rule=rule,
                        mask=mask,
                        start=starts[sequence],
                        node_fine=appended.node_fine,
                        node_coarse=appended.node_coarse,
                    )
                    chosen = choose(scores, rule)
                out[token] = attend(
                    pages, q_row, table[sequence], length=length, position=position, mask=mask, chosen=chosen
                )
        return (out.reshape(tokens, -1).numpy(),)


def _rule(attributes: dict[str, Any]) -> Any:
    """The rule as the plugin reads it from the node, for heads that no kernel takes too."""
    names = AttentionOperator.field_types()
    fields = {name: attributes[name] for name in names}
    return AttentionOperator(**{**fields, "heads": 2, "kv_heads": 1, "head_dim": 64}).selection
