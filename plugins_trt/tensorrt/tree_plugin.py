"""`edged::VerifyTree`: the path that a tree's drawn tokens follow, and its keys and values moved, as a TensorRT node.

It stands behind the logits: by then every layer has stored what the tree's nodes bring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from plugins_trt.contract import MAX_TREE, Batch, DeviceArray
from plugins_trt.tensorrt.names import VERIFY_TREE, VERIFY_TREE_VERSION
from plugins_trt.tensorrt.operator import PluginOperator, Port
from plugins_trt.tensorrt.sessions import session_of
from plugins_trt.verify_tree.contract import VerifyTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class VerifyTreeOperator(PluginOperator):
    """Fields of the node.

    Attributes:
        keep: 1 if the accepted nodes' keys and values move to the slots behind their sequence's earlier tokens; 0 leaves them
            where they are.
    """

    keep: int

    NAME: ClassVar[str] = VERIFY_TREE
    VERSION: ClassVar[str] = VERIFY_TREE_VERSION

    def __post_init__(self) -> None:
        """Refuse other values.

        Raises:
            ValueError: Naming the field.
        """
        if self.keep not in (0, 1):
            raise ValueError(f"keep: {self.keep}, must be 0 or 1")

    @property
    def inputs(self) -> tuple[Port, ...]:
        """T tokens, S sequences, P pages a sequence."""
        of_token, of_sequence = (("int32",), ("T",)), (("int32",), ("S",))
        return (
            Port("token_ids", *of_token),
            Port("targets", *of_token),
            Port("positions", *of_token),
            Port("sequence_starts", ("int32",), ("S+1",)),
            Port("lengths", *of_sequence),
            Port("page_tables", ("int32",), ("S", "P")),
            Port("tree_masks", ("int32",), ("T", 2)),
        )

    @property
    def outputs(self) -> tuple[Port, ...]:
        """The accepted nodes of each sequence, root first, and how many; what lies behind them means nothing."""
        return (
            Port("paths", ("int32",), ("S", MAX_TREE)),
            Port("accepted", ("int32",), ("S",)),
        )

    def workspace_bytes(self, sizes: Mapping[str, int]) -> int:  # noqa: ARG002
        """None."""
        return 0

    def enqueue(
        self, inputs: Sequence[DeviceArray], outputs: Sequence[DeviceArray], workspace: int, stream: int
    ) -> None:
        """Verify, and move what is kept, on the session's pages.

        Of a step without trees, whose masks are zeros, nothing is accepted.

        Raises:
            SessionError: No executor runs on this stream, or it brought no kernels for trees.
            LaunchError: The kernels refuse an argument.
        """
        del workspace
        arrays = {port.name: array for port, array in zip(self.inputs, inputs, strict=True)}
        paths, accepted = outputs
        sequences = accepted.shape[0]
        # More tokens than trees can have are a chunk, of which nothing is looked at.
        tokens = min(arrays["positions"].shape[0], MAX_TREE * sequences)

        def first(name: str) -> DeviceArray:
            return DeviceArray(arrays[name].pointer, "int32", (tokens,))

        batch = Batch(
            sequence_starts=arrays["sequence_starts"],
            lengths=arrays["lengths"],
            page_tables=arrays["page_tables"],
            positions=first("positions"),
            # Two halves in the graph, one word in the kernels.
            tree_masks=DeviceArray(arrays["tree_masks"].pointer, "int64", (tokens,)),
        )
        session_of(stream).verify(
            VerifyTree(batch, first("token_ids"), first("targets"), paths, accepted), keep=bool(self.keep)
        )
