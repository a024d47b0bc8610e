"""One tree of draft tokens held against what its request draws: node after node, as if each had a step of its own.

The token drawn at a node is taken by the request before the next node is drawn, so penalties, forbidden tokens, stops
and the grammar see what they would see without drafts. The random number of a draw belongs to its position, so the
answer is the same, whatever was drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edged.executor.base import OFF_PATH, SamplingRow
from edged.executor.host_sampler import NO_TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edged.executor.base import FloatArray
    from edged.executor.host_sampler import HostSampler, Logprobs
    from edged.scheduler.request import Request
    from edged.speculation.tree import DraftTree


class Verification:
    """What became of one tree.

    Args:
        request: Whose tree it is.
        tree: Its root is the request's last token.
    """

    def __init__(self, request: Request, tree: DraftTree) -> None:
        self.tree = tree
        self.path = [0]
        """The accepted nodes, the root first; their tokens are the request's, and stored."""
        self.taken: list[int] = []
        """The tokens that the request took."""
        self.text = ""
        """What became final with them."""
        self.logprobs: list[Logprobs] = []
        """One a token, where the request asks for them."""
        self.forbidden = False
        """Whether a draw found every token forbidden."""
        self._request = request
        self._at: int | None = 0  # the node that is drawn next
        self._answers: dict[int, int] = {}  # node -> the token after it

    def sampling_rows(self) -> list[SamplingRow]:
        """How the token after each node is drawn."""
        request, host = self._request, self._request.host
        rows = [request.sampling_row(request.stored + depth + 1) for depth in self.tree.depths]
        if host is None:
            return rows
        return [
            SamplingRow(
                row.temperature, row.top_k, row.top_p, row.seed, row.position, _NodeDraw(self, host, node)
            )
            for node, row in enumerate(rows)
        ]

    def finish(self, drawn: Sequence[int]) -> None:
        """Take the tokens that the executor drew, as far as the path goes; what the host drew is taken already."""
        if self._request.host is None:
            while self._at is not None:
                self.advance(drawn[self._at])

    def draw(self, node: int, host: HostSampler, logits: FloatArray, row: SamplingRow) -> int:
        """The token after a node of the path, which the request takes; parents come before their children."""
        if node == self._at:
            token = host.draw(logits, row)
            logprobs = host.logprobs
            self.advance(token)
            if logprobs is not None:
                self.logprobs.append(logprobs)
        return self._answers.get(node, OFF_PATH)

    def advance(self, token: int) -> None:
        """``token`` was drawn at the end of the path."""
        node, self._at = self._at, None
        assert node is not None, "only the end of the path is drawn"  # noqa: S101
        if token == NO_TOKEN:
            self._answers[node] = NO_TOKEN
            self.forbidden = True
            return
        taken, text = self._request.take(token)
        self.taken += taken
        self.text += text
        for each in taken:
            self._answers[node] = each
            child = self.tree.follow(node, each)
            if child is None:
                return
            self.path.append(child)
            node = child
        if not self._request.answer.ended:
            self._at = node


@dataclass(frozen=True)
class _NodeDraw:
    """Stands for the host's sampler in the row of one node."""

    verification: Verification
    host: HostSampler
    node: int

    def draw(self, logits: FloatArray, row: SamplingRow) -> int:
        """The token after the node; ``OFF_PATH`` where no path leads there."""
        return self.verification.draw(self.node, self.host, logits, row)
