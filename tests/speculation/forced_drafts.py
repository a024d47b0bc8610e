"""Speculation that never hesitates, and drafts whose guesses a test knows."""

from __future__ import annotations

import random

from edged.speculation.speculator import Speculator
from edged.speculation.tree import Proposal


class GuessingDraft:
    """Bushy trees of tokens that are partly what will come.

    Args:
        prompt: Tokens.
        truth: (prompt, tokens so far, depth) to what comes next, or None.
        vocabulary: Token ids.
        share: Part of the guesses that are right where the truth is known.
    """

    def __init__(self, prompt, truth, vocabulary, share=0.7):
        self.prompt = prompt.tolist()
        self.answer = []
        self._truth, self._vocabulary, self._share = truth, vocabulary, share
        self._random = random.Random(sum(self.prompt))
        self.slot = None

    def close(self):
        pass

    def extend(self, tokens):
        self.answer += tokens

    def propose(self, depth, rates):
        r, proposal = self._random, Proposal()
        if r.random() < 0.1:
            return None
        spine = -1  # the end of the path that is right so far
        depths = {-1: 0}
        for _ in range(r.randint(1, 63)):
            parent = spine if r.random() < 0.6 else r.choice(list(depths))
            if depths[parent] == depth:
                continue
            token = r.randrange(self._vocabulary)
            right = self._truth(self.prompt, self.answer, depths[parent]) if parent == spine else None
            if right is not None and r.random() < self._share:
                token = right
            chance = 0.9 * (proposal.chances[parent] if parent >= 0 else 1.0)
            node = proposal.add(token, parent, chance, 0)
            depths[node] = depths[parent] + 1
            if token == right:
                spine = node
        return proposal


def forced(make_draft, tree_size, depth=None):
    """A speculator that verifies every guess."""
    return Speculator(
        make_draft, (0.5,), tree_size=tree_size, depth=depth or max(tree_size - 1, 1), adaptive=False
    )
