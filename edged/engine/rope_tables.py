"""Cos and sin of every position, as the attention node reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from edged.models.architecture import Architecture


def rope_tables(
    architecture: Architecture, context_length: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cos and sin, fp32 ``[context_length, D / 2]`` each.

    Angles are products of fp32 numbers, as in the published code and in the torch executor; ``attention_factor`` is
    already in them.
    """
    frequencies = architecture.rope.inverse_frequencies(architecture.head_dim, context_length)  # [D / 2]
    angles = np.arange(context_length, dtype=np.float32)[:, None] * frequencies[None, :]
    factor = np.float32(architecture.rope.attention_factor)
    return np.cos(angles) * factor, np.sin(angles) * factor
