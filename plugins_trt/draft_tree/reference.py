"""The growth of a draft's tree in plain torch, a level at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from plugins_trt.draft_tree.contract import PART, parts_of


def key_of(logit: float, token_id: int) -> int:
    """The key of one token, as `draft_top` makes it: an unsigned number of 64 bits."""
    value = -torch.inf if math.isnan(logit) else logit + 0.0
    bits = int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
    rising = ~bits & 0xFFFFFFFF if bits < 0 else bits | 0x80000000
    return rising << 32 | (~token_id & 0xFFFFFFFF)


def top(logits: torch.Tensor, width: int) -> tuple[list[list[list[int]]], torch.Tensor]:
    """Keys ``[R][parts][width]`` and statistics ``[R, parts, 2]`` of logits ``[R, V]``."""
    rows, vocabulary = logits.shape
    values = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    keys, statistics = [], torch.empty(rows, parts_of(vocabulary), 2)
    for row in range(rows):
        lists = []
        for part in range(parts_of(vocabulary)):
            piece = values[row, part * PART : (part + 1) * PART]
            order = piece.sort(descending=True, stable=True).indices[:width].tolist()
            lists.append(
                [key_of(float(piece[each]), part * PART + each) for each in order]
                + [0] * (width - len(order))
            )
            statistics[row, part, 0] = piece.max()
            statistics[row, part, 1] = (piece - piece.max()).exp().sum()
        keys.append(lists)
    return keys, statistics


@dataclass
class Growing:
    """A tree as far as it has grown: its pool, and the rows that run next."""

    width: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    joint: list[float] = field(default_factory=list)  # of every node of the pool
    nodes: list[int] = field(default_factory=list)  # that run next
    masks: list[int] = field(default_factory=list)  # of all rows that ran or run next
    parent_rows: list[int] = field(
        default_factory=list
    )  # of those that run next: among the level before, -1: the root


def grow(tree: Growing, probabilities: torch.Tensor, token_map: torch.Tensor | None = None) -> None:
    """One level: the children of the rows that ran, whose probabilities are ``[R, V]``, and what runs next."""
    ran, first = tree.nodes, len(tree.tokens)
    width, first_row = tree.width, len(tree.masks) - len(ran)
    for row, chances in enumerate(probabilities):
        order = chances.sort(descending=True, stable=True).indices[:width].tolist()
        parent = ran[row] if ran else -1
        for column in order:
            tree.tokens.append(column if token_map is None else int(token_map[column]))
            tree.parents.append(parent)
            tree.chances.append(float(chances[column]))
            tree.joint.append((tree.joint[parent] if ran else 1.0) * float(chances[column]))
    children = range(first, len(tree.tokens))
    chosen = sorted(sorted(children, key=lambda node: -tree.joint[node])[:width])
    above = [(node - first) // width for node in chosen]
    masks = [tree.masks[first_row + row] if ran else 0 for row in above]
    tree.parent_rows = [row if ran else -1 for row in above]
    tree.nodes = chosen
    tree.masks += [mask | 1 << len(tree.masks) + place for place, mask in enumerate(masks)]
