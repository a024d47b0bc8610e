"""The operators of a draft as this machine's CPU runs them, on the pointers that the kernels are given."""

from __future__ import annotations

import torch
from host_memory import masks_of, pages_of, tensor_of

from edged.executor.cuda_draft_kernels import DraftKernels
from plugins_trt.append.reference import rotate
from plugins_trt.decode_attention.reference import attend
from plugins_trt.draft_input.reference import draft_rows, window
from plugins_trt.draft_take.reference import taken_rows
from plugins_trt.draft_tree.reference import Growing, grow


def maybe(array):
    return None if array is None else tensor_of(array)


class HostDraft:
    """One draft's operators; ``packed`` is the target's."""

    def __init__(self, packed):
        self.packed = packed

    @property
    def kernels(self):
        return DraftKernels(self.rows, self.append, self.attend, self.top, self.grow, self.take, self.packed)

    @staticmethod
    def rows(args):
        tensor_of(args.out).copy_(
            draft_rows(
                tensor_of(args.embedding),
                tensor_of(args.token_ids),
                tensor_of(args.hidden),
                tensor_of(args.hidden_rows),
                embedding_norm=maybe(args.embedding_norm),
                hidden_norm=maybe(args.hidden_norm),
                scale=args.scale,
                epsilon=args.epsilon,
            )
        )
        blocks, counts = window(tensor_of(args.positions), *args.blocks.shape[1:])
        tensor_of(args.blocks).copy_(blocks)
        tensor_of(args.counts).copy_(counts)

    @staticmethod
    def sequence(batch):
        """Rows of the one sequence, the slot of row 0, and its table; rows before 0 ran in earlier launches."""
        first, end = tensor_of(batch.sequence_starts).tolist()
        length = tensor_of(batch.lengths).item()
        return range(max(first, 0), end), length - first, tensor_of(batch.page_tables)[0]

    def append(self, args):
        pages = pages_of(args.arena, 0)
        here, first, table = self.sequence(args.batch)
        positions, tables = tensor_of(args.batch.positions), [tensor_of(args.cosine), tensor_of(args.sine)]
        queries, keys = (
            rotate(tensor_of(each), positions, cosine=tables[0], sine=tables[1], norm=None, epsilon=0.0)
            for each in (args.q, args.k)
        )
        tensor_of(args.q_out).copy_(queries)
        for row in here:
            slot = torch.tensor([first + row])
            pages.write("keys", table, slot, keys[row : row + 1])
            pages.write("values", table, slot, tensor_of(args.v)[row : row + 1].float())

    def attend(self, args):
        args.plan(132)
        pages, out = pages_of(args.arena, 0), tensor_of(args.out)
        here, _, table = self.sequence(args.batch)
        length = tensor_of(args.batch.lengths).item()
        masks, positions = masks_of(args.batch), tensor_of(args.batch.positions).tolist()
        out.zero_()
        for row in here:
            chosen = torch.zeros(args.arena.kv_heads, positions[row] // 64 + 1, dtype=torch.bool)
            for head in range(args.arena.kv_heads):
                count = int(tensor_of(args.counts)[row, head])
                chosen[head, tensor_of(args.blocks)[row, head, :count].long()] = True
            place = {"length": length, "position": positions[row], "mask": masks[row]}
            out[row] = attend(pages, tensor_of(args.q)[row], table, chosen=chosen, **place).to(out.dtype)

    def top(self, args):
        self._probabilities = tensor_of(args.logits).softmax(-1)  # (keys are the kernels' own affair)

    @staticmethod
    def take(args):
        accepted, length = tensor_of(args.accepted).item(), tensor_of(args.lengths).item()
        found = taken_rows(tensor_of(args.drawn), tensor_of(args.path), accepted, length)
        for name, values in found.items():
            tensor_of(getattr(args, name)).copy_(values)

    def grow(self, args):
        width, level = args.candidates.shape[2], args.level
        if level == 0:
            self._tree = Growing(width)
        tree = self._tree
        first = len(tree.tokens)
        grow(tree, self._probabilities, maybe(args.token_map))
        for name in ("tokens", "parents", "chances"):
            pool = tensor_of(getattr(args, name))
            pool[first : len(tree.tokens)] = torch.tensor(getattr(tree, name)[first:], dtype=pool.dtype)
        if level + 1 == args.levels:
            return
        at = slice(level * width, (level + 1) * width)
        root, before = tensor_of(args.root_row).item(), args.first_row + (level - 1) * width
        above = [root if row < 0 else before + row for row in tree.parent_rows]
        masks = [mask - (1 << 64) if mask >> 63 else mask for mask in tree.masks[-width:]]
        tensor_of(args.token_ids)[at] = torch.tensor([tree.tokens[node] for node in tree.nodes]).int()
        tensor_of(args.positions)[at] = tensor_of(args.lengths) + level
        tensor_of(args.hidden_rows)[at] = torch.tensor(above).int()
        tensor_of(args.masks)[at] = torch.tensor(masks)
