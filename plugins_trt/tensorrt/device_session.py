"""The session of a model on a GPU: its pages, its scratch memory and its kernels, for the nodes of its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugins_trt.attention.contract import Attention
from plugins_trt.commit.contract import Commit
from plugins_trt.tensorrt import sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from typing_extensions import Self

    from plugins_trt.arena import Arena
    from plugins_trt.contract import DeviceArray
    from plugins_trt.ternary_linear.contract import TernaryLinear
    from plugins_trt.verify_tree.contract import VerifyTree
    from plugins_trt.w4a16_linear.contract import W4A16Linear


class DeviceSession:
    """A :class:`plugins_trt.tensorrt.sessions.Session`; open while it is entered as a context.

    The memory belongs to whoever made it. Nodes of a step run one after the other on one stream, so they share the
    scratch memory.

    Attributes:
        tree: Whether the next step verifies a tree. It is read when a step is enqueued or captured, not when a
            captured one is replayed.
        dense: Whether no query of the next step is far enough to attend sparsely: blocks are then not scored. Read as
            `tree` is.
        symmetric: Names of the 4-bit weights whose zero points are all 8. The plan does not say it: it serves every
            checkpoint of a shape.
    """

    def __init__(
        self,
        attend: Callable[[Attention, Any], None],
        *,
        stream: Any,  # noqa: ANN401 - PyCUDA is untyped
        arena: Arena,
        workspace: DeviceArray,
        arrived: DeviceArray | None,
        multiply: Callable[[Any, Any], None] | None = None,
        symmetric: Collection[str] = frozenset(),
        trees: tuple[Callable[[VerifyTree, Any], None], Callable[[Commit, Any], None]] | None = None,
    ) -> None:
        """Takes the parts.

        Args:
            attend: The kernels: a :class:`plugins_trt.attention.launch.Attender`.
            stream: The PyCUDA stream whose handle TensorRT gets.
            arena: The model's pages.
            workspace: Scratch memory, at least `plugins_trt.attention.contract.Layout.total` of the largest bucket.
            arrived: Counters, zero before the first step; None where every query is dense.
            multiply: The kernels of packed weights, a :class:`plugins_trt.w4a16_linear.launch.W4A16Multiplier` or a
                :class:`plugins_trt.ternary_linear.launch.TernaryMultiplier`; None for a model without any.
            symmetric: See the class.
            trees: The kernels that find the paths of trees and that keep them, a
                :class:`plugins_trt.verify_tree.launch.TreeVerifier` and a :class:`plugins_trt.commit.launch.Committer`; None
                where nothing drafts.
        """
        self.tree = False
        self.dense = False
        self.symmetric = symmetric
        self._attend = attend
        self._stream = stream
        self._arena = arena
        self._workspace = workspace
        self._arrived = arrived
        self._multiply = multiply
        self._trees = trees

    def __enter__(self) -> Self:
        """Let the nodes find it.

        Raises:
            SessionError: The stream has a session.
        """
        sessions.open_session(int(self._stream.handle), self)
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        sessions.close_session(int(self._stream.handle))

    def attend(self, call: sessions.AttentionCall) -> None:
        """Enqueue one layer.

        Raises:
            LaunchError: An argument is refused; nothing ran.
        """
        self._attend(
            Attention(
                batch=call.batch,
                arena=self._arena,
                layer=call.layer,
                q=call.q,
                k=call.k,
                v=call.v,
                out=call.out,
                cosine=call.cosine,
                sine=call.sine,
                workspace=self._workspace,
                arrived=self._arrived,
                q_norm=call.q_norm,
                k_norm=call.k_norm,
                epsilon=call.epsilon,
                rule=None if self.dense else call.selection,
            ),
            self._stream,
        )

    def multiply(self, product: W4A16Linear | TernaryLinear) -> None:
        """Enqueue one product.

        Raises:
            SessionError: The session was opened without kernels of packed weights.
            LaunchError: An argument is refused; nothing ran.
        """
        if self._multiply is None:
            raise sessions.SessionError(
                "a node multiplies with packed weights, and the executor brought no kernels of them: the plan belongs to "
                "another model"
            )
        self._multiply(product, self._stream)

    def verify(self, tree: VerifyTree, *, keep: bool) -> None:
        """Enqueue the search for a step's paths, and the move of what they accept.

        Raises:
            SessionError: The session was opened without kernels for trees.
            LaunchError: An argument is refused; nothing ran.
        """
        if self._trees is None:
            raise sessions.SessionError(
                "a node verifies trees of draft tokens, and the executor brought no kernels for them: the plan belongs to "
                "another model"
            )
        verify, commit = self._trees
        verify(tree, self._stream)
        if keep:
            commit(Commit(tree.batch, self._arena, tree.paths, tree.accepted), self._stream)
