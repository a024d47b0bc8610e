"""Chooses what a step verifies: for each sequence as many draft tokens as pay, from measured costs and acceptance.

A step of S streams gives S tokens. With the k likeliest draft nodes it gives S and the sum of their chances, and takes
longer by a factor that was measured; the k with the most tokens a second is taken (as SmartSpec, arXiv 2406.14066, does
for chains). Where none gains clearly, the step is a plain one.

What was lost by drafts that failed is kept account of, a sequence by itself: it may risk a small part of its time and
what drafts have gained before, and nothing beyond that, whatever its text is like. So the first drafts of a sequence are
those that are nearly certain, or that cost nearly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edged.speculation.acceptance import Acceptance, verified_nodes
from edged.speculation.costs import SIZES, StepCosts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edged.executor.base import Int32Array
    from edged.speculation.tree import Draft, DraftTree, Proposal

_LEAST_GAIN = 1.05
"""Tokens a second over those without drafts, below which none are verified."""
_ALLOWANCE = 0.015
"""Part of a sequence's time that failed drafts may cost."""
_FIRST_CREDIT = 0.4
"""What a new sequence may risk, in steps without drafts."""
_MOST_CREDIT = 4.0
"""Steps that earlier gains may stand for."""


@dataclass
class SequenceDrafts:
    """The drafts of one sequence.

    Attributes:
        draft: Guesses.
        acceptance: Its running rates.
        known: Tokens of the answer that the draft has been told.
        credit: What it may lose, in steps without drafts.
        drafted: Draft tokens that were verified.
        accepted: Those of them that were right.
    """

    draft: Draft
    acceptance: Acceptance
    known: int = 0
    credit: float = _FIRST_CREDIT
    drafted: int = 0
    accepted: int = 0


@dataclass
class Offer:
    """What one sequence could verify in the next step, and what it may risk with it."""

    proposal: Proposal
    credit: float
    order: list[int] = field(init=False)
    """The nodes, the likeliest first; a parent always comes before its children."""

    def __post_init__(self) -> None:
        """Sorts the nodes; the sort is stable, and no child is likelier than its parent."""
        chances = self.proposal.chances
        self.order = sorted(range(len(chances)), key=lambda node: -chances[node])


class Speculator:
    """Speculation of one model.

    Args:
        make_draft: Makes the draft of a sequence out of its prompt.
        priors: Acceptance by the draft's classes before anything was seen.
        tree_size: Most nodes of a tree, its root included.
        depth: Most draft tokens of a path.
        adaptive: Whether only what pays is verified; else whatever is drafted and has room.
    """

    def __init__(
        self,
        make_draft: Callable[[Int32Array], Draft],
        priors: Sequence[float],
        *,
        tree_size: int,
        depth: int,
        adaptive: bool = True,
    ) -> None:
        self.tree_size, self.depth = tree_size, depth
        self._adaptive = adaptive
        self.costs = StepCosts()
        self.drafted = 0
        """Draft tokens that were verified, of all requests."""
        self.accepted = 0
        """Those of them that were right."""
        self._make_draft = make_draft
        self._acceptance = Acceptance(priors)

    def start(self, prompt: Int32Array) -> SequenceDrafts:
        """The drafts of a new sequence."""
        return SequenceDrafts(self._make_draft(prompt), self._acceptance.of_sequence())

    def wants(self, drafts: SequenceDrafts) -> bool:
        """Whether a sequence may draft at all; it costs nothing to ask."""
        return self.tree_size > 1 and (drafts.credit >= 0 or not self._adaptive)

    def propose(self, drafts: SequenceDrafts, answer: Sequence[int], depth: int) -> Proposal | None:
        """A sequence's guess.

        Args:
            drafts: It.
            answer: Its tokens behind the prompt.
            depth: Most tokens that it may still accept.
        """
        drafts.draft.extend(answer[drafts.known :])
        drafts.known = len(answer)
        depth = min(self.depth, self.tree_size - 1, depth)
        return drafts.draft.propose(depth, drafts.acceptance.rates()) if depth > 0 else None

    def choose(self, offers: Sequence[Offer | None], room: int) -> list[Proposal | None]:
        """What of each offer is verified in a step of these sequences.

        Args:
            offers: One for each stream of the step.
            room: Tokens that the step may hold beside one for each stream.
        """
        if not self._adaptive:
            return self._all(offers, room)
        streams = len(offers)
        none: list[Proposal | None] = [None] * streams
        if self.costs.plain(streams) is None:
            return none  # nothing is known of a step without drafts
        ranked = sorted(
            (
                (offer.proposal.chances[node], -rank, -index)
                for index, offer in enumerate(offers)
                if offer is not None and self._is_worth_its_risk(streams, offer)
                for rank, node in enumerate(offer.order[: self.tree_size - 1])
            ),
            reverse=True,
        )[:room]
        if not ranked:
            return none
        count = self._best_count(streams, [chance for chance, _, _ in ranked])
        chosen = [0] * streams
        for _, _, index in ranked[:count]:
            chosen[-index] += 1
        return [
            offer.proposal.part(sorted(offer.order[:nodes])) if offer is not None and nodes else None
            for offer, nodes in zip(offers, chosen, strict=True)
        ]

    def note_step(self, streams: int, tokens: int, seconds: float, drafting: float = 0.0) -> float:
        """A step of streams alone ran.

        Args:
            streams: Sequences.
            tokens: Tokens, drafts among them.
            seconds: What it took.
            drafting: What making the drafts took before it, which a step with drafts costs, too.

        Returns:
            What it would have taken without drafts.
        """
        if tokens == streams:
            self.costs.note_plain(streams, seconds)
            return seconds
        plain = self.costs.plain(streams)
        self.costs.note_verified(streams, tokens, seconds + drafting)
        return seconds if plain is None else min(plain, seconds)

    def note_idle(self, drafts: Sequence[SequenceDrafts], steps: float) -> None:
        """Drafts were made, at the cost of so many plain steps, and none was verified."""
        for each in drafts:
            if self.wants(each):
                each.credit -= steps

    def note_plain_token(self, drafts: SequenceDrafts) -> None:
        """A sequence has gone on by one token without drafts."""
        drafts.credit = min(drafts.credit + _ALLOWANCE, _MOST_CREDIT)

    def note_verified(
        self, drafts: SequenceDrafts, tree: DraftTree, path: Sequence[int], *, extra: float
    ) -> None:
        """A sequence's tree was verified.

        Args:
            drafts: Its drafts.
            tree: The tree.
            path: The accepted nodes, the root first.
            extra: What its drafts added to the step, in steps without drafts for each stream.
        """
        accepted = len(path) - 1
        for kind, right in verified_nodes(tree, path):
            drafts.acceptance.note(kind, accepted=right)
            self._acceptance.note(kind, accepted=right)
        drafts.credit = min(drafts.credit + _ALLOWANCE * len(path) + accepted - extra, _MOST_CREDIT)
        drafts.drafted += len(tree) - 1
        drafts.accepted += accepted
        self.drafted += len(tree) - 1
        self.accepted += accepted

    def _all(self, offers: Sequence[Offer | None], room: int) -> list[Proposal | None]:
        """What is drafted, the likeliest of each; where that is more than there is room for, each has a fair part."""
        chosen: list[Proposal | None] = []
        for left, offer in zip(range(len(offers), 0, -1), offers, strict=True):
            nodes = 0 if offer is None else min(len(offer.order), self.tree_size - 1, room // left)
            room -= nodes
            chosen.append(
                offer.proposal.part(sorted(offer.order[:nodes])) if offer is not None and nodes else None
            )
        return chosen

    def _is_worth_its_risk(self, streams: int, offer: Offer) -> bool:
        """Whether an offer pays by itself, and its sequence may lose what its failure would cost."""
        chances = [offer.proposal.chances[node] for node in offer.order[: self.tree_size - 1]]
        count = self._best_count(streams, chances)
        if not count:
            return False
        cost = (self.costs.factor(streams, streams + count) - 1) * streams
        return (1 - chances[0]) * cost <= offer.credit

    def _best_count(self, streams: int, chances: Sequence[float]) -> int:
        """How many of the nodes, the likeliest first, make the most of a step's time."""
        best, best_gain = 0, _LEAST_GAIN
        gained, taken = 0.0, 0
        for size in SIZES:
            if size <= streams:
                continue
            end = min(size - streams, len(chances))
            gained += sum(chances[taken:end])
            taken = end
            gain = (1 + gained / streams) / self.costs.factor(streams, streams + taken)
            if gain > best_gain:
                best, best_gain = taken, gain
            if taken == len(chances):
                break
        return best
