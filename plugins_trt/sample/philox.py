"""Philox4x32-10, the counter-based generator of "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A number depends on its key and counter alone: a token drawn with ``(seed, position)`` is the same in any batch, on any
device, and whether it was drafted or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for a 128-bit counter and a 64-bit key, each given as 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first = c0 * _MULTIPLIERS[0]
        second = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-32, for the token at ``position`` of a sequence.

    The key is the seed's low and high word; the counter is the position's low and high word, then two zeros; the number
    is the first of the four words.

    Args:
        seed: Unsigned, 64 bits.
        position: Unsigned, 64 bits.
    """
    word = philox((position & _MASK, position >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))[0]
    return word / 2**32


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """:func:`uniform` of many, at once."""
    mask, shift = np.uint64(_MASK), np.uint64(32)
    seed, position = (np.array(values, np.uint64) for values in (seeds, positions))
    c0, c1 = position & mask, position >> shift
    c2 = c3 = np.zeros_like(c0)
    k0, k1 = seed & mask, seed >> shift
    m0, m1 = (np.uint64(each) for each in _MULTIPLIERS)
    w0, w1 = (np.uint64(each) for each in _WEYL)
    for _ in range(_ROUNDS):
        first, second = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & mask, (first >> shift) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    numbers: npt.NDArray[np.float64] = c0.astype(np.float64) / 2**32
    return numbers
