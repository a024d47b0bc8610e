"""Gives the streams of a step their trees of draft tokens, and learns from what became of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edged.scheduler.verification import Verification
from edged.speculation.speculator import Offer
from edged.speculation.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.scheduler.request import Request
    from edged.speculation.speculator import Speculator


class Drafting:
    """Speculation for the scheduler's requests.

    Args:
        speculator: Chooses what is verified.
    """

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator
        self._drafting = 0.0  # seconds that the drafts of the next step took
        self._extra = 0.0  # what a draft node added to the last step, in steps of one stream

    def begin(self, request: Request) -> None:
        """A request starts, or starts again."""
        if request.drafts is None and request.speculates:
            request.drafts = self.speculator.start(request.prompt)

    def end(self, request: Request) -> None:
        """A request has ended."""
        if request.drafts is not None:
            request.drafts.draft.close()

    def draft(self, streams: Sequence[Request], room: int) -> bool:
        """Give the streams of the next step their trees; False if none has one.

        Args:
            streams: Every request of the step; each decodes.
            room: Tokens that the step may hold beside one for each of them.
        """
        speculator = self.speculator
        offers: list[Offer | None] = []
        begun = time.monotonic()
        for request in streams:
            offer = None
            drafts = request.drafts
            if drafts is not None and speculator.wants(drafts):
                # The step draws a token itself, so one fewer may come of drafts.
                proposal = speculator.propose(drafts, request.generated, request.tokens_left - 1)
                if proposal is not None and len(proposal):
                    offer = Offer(proposal, drafts.credit)
            offers.append(offer)
        self._drafting = time.monotonic() - begun
        if not any(offers):
            return False
        found = False
        for request, proposal in zip(streams, speculator.choose(offers, room), strict=True):
            kept = None if proposal is None else proposal.kept(request.may_go_on_with)
            if kept is not None and len(kept):
                request.verification = Verification(request, DraftTree(request.last_token, kept))
                found = True
        return found

    def note_step(self, streams: Sequence[Request], seconds: float) -> float:
        """A step of these streams alone ran; return what it would have taken without drafts."""
        nodes = 0
        for request in streams:
            if request.verification is not None:
                nodes += len(request.verification.tree) - 1
            elif request.drafts is not None:
                self.speculator.note_plain_token(request.drafts)
        count = len(streams)
        drafting, self._drafting = self._drafting, 0.0
        plain = self.speculator.note_step(count, count + nodes, seconds, drafting)
        self._extra = (seconds + drafting - plain) / plain * count / nodes if nodes else 0.0
        if not nodes and drafting:  # drafts were made and none was worth a try
            self.speculator.note_idle(
                [request.drafts for request in streams if request.drafts is not None], drafting / plain
            )
        return plain

    def note_verified(self, request: Request, verification: Verification) -> None:
        """A request has taken what its tree gave."""
        if request.drafts is not None:
            tree = verification.tree
            self.speculator.note_verified(
                request.drafts, tree, verification.path, extra=self._extra * (len(tree) - 1)
            )
