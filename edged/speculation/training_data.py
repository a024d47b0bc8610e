"""The sequences that a draft is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edged.speculation.training_step import Batch


@dataclass(frozen=True)
class TrainingData:
    """Sequences.

    Attributes:
        tokens: Token ids, int64 ``[S, L]``.
        hidden: The target's final norm's outputs, ``[S, L, H]``.
        counts: Which rows are trained, fp32 ``[S, L - 1]``, 0 or 1: row i foresees token i + 2.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    counts: torch.Tensor

    def near(self, device: torch.device) -> TrainingData:
        """Tokens and hidden states on a GPU, where they take no more than a third of its free memory."""
        if device.type != "cuda" or 3 * self.hidden.nbytes > torch.cuda.mem_get_info(device)[0]:
            return self
        return TrainingData(self.tokens.to(device), self.hidden.to(device), self.counts)

    def part(
        self, some: torch.Tensor, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, hidden states and counts of some sequences, on a device."""
        found = (each[some.to(each.device)].to(device) for each in (self.tokens, self.hidden, self.counts))
        tokens, hidden, counts = found
        return tokens, hidden, counts

    def batch(self, some: torch.Tensor, rows: int, *, seed: int, device: torch.device) -> Batch:
        """Some sequences and so many of their rows that count, by chance where there are more; fewer are filled up."""
        counts = self.counts[some]
        found = counts.flatten().nonzero()[:, 0]
        chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))[:rows]
        index, shares = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        index[: len(chosen)], shares[: len(chosen)] = found[chosen], 1.0
        tokens, hidden, _ = self.part(some, device)
        return Batch(tokens, hidden, index.to(device), shares.to(device))
