"""`draft_take` in plain torch."""

from __future__ import annotations

import torch

from plugins_trt.draft_take.contract import ROWS


def taken_rows(
    drawn: torch.Tensor,  # int [T]
    path: torch.Tensor,  # int [64]
    accepted: int,
    length: int,
) -> dict[str, torch.Tensor]:
    """Everything that the operator writes, by the names of its arguments; int32."""
    nodes = path[:accepted].long()
    token_ids = torch.full((ROWS,), -1, dtype=torch.int32)
    hidden_rows, positions = torch.zeros(2, ROWS, dtype=torch.int32)
    token_ids[:accepted] = drawn[nodes].int().cpu()
    hidden_rows[:accepted] = nodes.int().cpu()
    positions[:accepted] = length + torch.arange(accepted, dtype=torch.int32)
    return {
        "token_ids": token_ids,
        "hidden_rows": hidden_rows,
        "positions": positions,
        "starts": torch.tensor([0, accepted], dtype=torch.int32),
        "tree_lengths": torch.tensor([length + accepted], dtype=torch.int32),
        "root_row": torch.tensor([max(accepted - 1, 0)], dtype=torch.int32),
    }
