"""A model's own continuations of prompts, and its hidden states over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt

    from edged.executor.base import Progress
    from edged.executor.torch_batch import BatchModel
    from edged.speculation.training_prompts import Prompts

    Tokens = npt.NDArray[np.int32]

_MOST_TOGETHER = 1024
_CPU_TOGETHER = 8
_READ_TOKENS = 1 << 16
"""Tokens whose hidden states are read in one pass on a GPU."""


def sequences_together(device: torch.device, bytes_each: int) -> int:
    """How many sequences a device continues side by side, of which each takes so much memory."""
    if device.type != "cuda":
        return _CPU_TOGETHER
    free, _ = torch.cuda.mem_get_info(device)
    return max(_CPU_TOGETHER, min(_MOST_TOGETHER, free // 4 // bytes_each))


def continue_prompts(
    model: BatchModel,
    prompts: Prompts,
    rows: slice,
    *,
    temperatures: npt.NDArray[np.float32],
    seed: int,
    length: int | None = None,
) -> Tokens:
    """Sequences that begin with prompts and go on as the model does.

    Args:
        model: Loaded; its ``sequences`` are at least as many as the rows.
        prompts: All of them.
        rows: Which of them.
        temperatures: Of each of them; 0 takes the likeliest token.
        seed: Of what is drawn.
        length: Tokens of each; None: as many as the model has room for.

    Returns:
        int32 ``[rows, length]``.
    """
    length = length or model.length
    ids, lengths = prompts.ids[rows], prompts.lengths[rows]
    count, room = len(lengths), model.sequences
    device = model.device
    given = np.zeros((room, model.length), np.int64)
    given[:count, : ids.shape[1]] = ids
    given[count:] = given[:1]
    heat = torch.ones(room, device=device)
    heat[:count] = torch.from_numpy(temperatures[rows]).to(device)
    ends = torch.full((room,), int(lengths[0]), device=device)
    ends[:count] = torch.from_numpy(lengths).to(device)
    tokens = torch.from_numpy(given).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    first = int(lengths.min())
    logits = model.logits(model.read(tokens[:, :first])[:, -1])
    for position in range(first, length):
        drawn = _draw(logits, heat, generator)
        tokens[:, position] = torch.where(ends > position, tokens[:, position], drawn)
        if position + 1 < length:
            logits = model.decode(tokens[:, position], position)
    result: Tokens = tokens[:count, :length].cpu().numpy().astype(np.int32)
    return result


def hidden_states(model: BatchModel, tokens: Tokens, progress: Progress) -> torch.Tensor:
    """The final norm's outputs of whole sequences ``[S, L]``, on the host: ``[S, L, H]`` in the model's type."""
    states = torch.empty(*tokens.shape, model.architecture.hidden, dtype=model.dtype)
    together = 1 if model.device.type != "cuda" else max(1, _READ_TOKENS // tokens.shape[1])
    together = min(together, model.sequences)
    for first in range(0, len(tokens), together):
        progress("reading hidden states", first, len(tokens))
        some = torch.from_numpy(tokens[first : first + together].astype(np.int64))
        states[first : first + together] = model.read(some)
    progress("reading hidden states", len(tokens), len(tokens))
    return states


def _draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token of each row ``[B, V]``; the largest of logits with Gumbel noise has the softmax's distribution."""
    noise = torch.empty_like(logits).exponential_(generator=generator).clamp_min_(1e-20).log_().neg_()
    return torch.addcmul(logits, noise, temperatures[:, None]).argmax(-1)
