"""A draft model on the CPU: one layer beside the target's, with keys and values of its own for a window of each sequence.

The target's final norm gives a hidden state for every token it has stored. With the token that came after it, each makes one
row of the draft: ``fc([embedding; hidden])``, then a decoder layer that attends to the last ``window`` rows of its sequence,
and to what stands before them in the block of 64 rows where they begin (so that on a GPU a window is whole pages).
The layer's output stands for the target's next hidden state: the LM head reads the next token's distribution from it, and it
is the hidden state of the rows below it in a tree. An EAGLE-3 draft sees three of the target's states instead, which ``fc`` makes
one of, and its attention takes ``[embedding; hidden]``; it and heads for multi-token prediction have a norm before the LM head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from edged.checkpoint.safetensors_files import WeightFiles
from edged.executor.torch_packed import PackedProduct, PackedWeight
from edged.executor.torch_weights import read_whole, store_packed
from edged.memory.draft_plan import CHUNK, MOST_NODES
from edged.memory.specs import PAGE_TOKENS
from edged.models.checkpoint import PackedLinear
from edged.models.draft_layout import EAGLE3
from edged.models.draft_weights import packed_shape
from edged.models.weights import SCALES, ZEROS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from edged.models.eagle import Eagle
    from edged.models.weights import Packing, WeightSpec


@dataclass
class DraftSlot:
    """What is held of one sequence.

    ``pending`` hidden states, of the positions from ``first`` on, wait for the tokens after them. Blocks are counted from
    ``base``.
    """

    index: int
    stored: int = 0  # rows of keys and values
    end: int = 0  # position behind the last of them
    base: int = 0  # position of the first row since tokens were last missed
    first: int = 0
    pending: list[torch.Tensor] = field(default_factory=list)  # [n, H] each

    @property
    def waiting(self) -> int:
        """Hidden states that wait."""
        return sum(part.shape[0] for part in self.pending)


class TorchEagle:
    """Runs one draft.

    Args:
        eagle: What its folder holds.
        buffers: By name: ``draft.fc`` and the others of :meth:`Eagle.shapes`, ``draft.kv`` ``[slots, 2, kv_heads, rows, D]``,
            ``draft.head`` ``[n, H]`` where a token map cuts the vocabulary; and the target's own.
        inverse_frequencies: Of the draft's rotary embedding, fp32 ``[D / 2]``.
        head: The target's LM head, ``[V, H]``.
        token_map: Token ids of the rows of ``draft.head``; None: all.
        window: Rows that a row attends to, its own among them.
    """

    def __init__(
        self,
        eagle: Eagle,
        buffers: Mapping[str, torch.Tensor],
        inverse_frequencies: torch.Tensor,
        *,
        head: torch.Tensor,
        token_map: torch.Tensor | None,
        window: int,
    ) -> None:
        self._a = eagle.layer
        self._layout = eagle.layout
        self._w = {
            name.removeprefix("draft."): each for name, each in buffers.items() if name.startswith("draft.")
        }
        self._embedding = buffers["embedding"]
        self._head = head
        self._map = token_map
        self._kv = self._w["kv"]
        self._blocks = -(-window // PAGE_TOKENS)
        self._most_pending = self._blocks * PAGE_TOKENS
        self._frequencies = inverse_frequencies
        self._free = list(range(self._kv.shape[0]))[::-1]
        self._packed: dict[str, PackedWeight] = {}
        if "packed_in" in self._w:
            self._product = PackedProduct(
                self._w["packed_in"], self._w["packed_tile"], self._w["packed_octets"]
            )

    def read(self, eagle: Eagle, head: torch.Tensor) -> None:
        """Fill the weights from the draft's files.

        Args:
            eagle: What its folder holds.
            head: The target's LM head, loaded.

        Raises:
            CheckpointError: A file is damaged.
        """
        with WeightFiles.open(eagle.folder) as files:
            for spec in eagle.specs:
                if spec.packing is None:
                    for source in spec.sources:
                        rows = slice(source.start, source.start + source.shape[0])
                        self._w[spec.name][rows].copy_(read_whole(files, source))
                else:
                    self._read_packed(files, spec, spec.packing, eagle)
        if self._map is not None and not eagle.has("head"):
            torch.index_select(head, 0, self._map, out=self._w["head"])

    def _read_packed(self, files: WeightFiles, spec: WeightSpec, packing: Packing, eagle: Eagle) -> None:
        for index, source in enumerate(spec.sources):
            linear = PackedLinear(
                spec.name, source.module, packed_shape(source, packing), source.start, index
            )
            store_packed(linear, eagle.read_packed(files, source, packing), self._w)
        self._packed[spec.name] = PackedWeight(
            self._w[spec.name], self._w[spec.name + SCALES], self._w[spec.name + ZEROS], ()
        )

    def open(self) -> DraftSlot | None:
        """Room for a new sequence; None where all is taken."""
        return DraftSlot(self._free.pop()) if self._free else None

    def close(self, slot: DraftSlot) -> None:
        """The sequence has ended."""
        slot.pending.clear()
        self._free.append(slot.index)

    def observe(self, slot: DraftSlot, hidden: torch.Tensor, first: int) -> None:
        """The target has stored more of a sequence.

        Args:
            slot: The sequence's.
            hidden: The final norm's output, ``[n, H]``, or what entered EAGLE-3's layers, ``[n, 3 H]``; copied.
            first: Position of the first of them.
        """
        if slot.pending and slot.first + slot.waiting != first:
            slot.pending.clear()
        if not slot.pending:
            slot.first = first
        slot.pending.append(hidden.to(torch.float32, copy=True))
        while (excess := slot.waiting - self._most_pending) > 0:  # no row will look back further
            oldest = slot.pending[0]
            if oldest.shape[0] <= excess:
                slot.first += slot.pending.pop(0).shape[0]
            else:
                slot.pending[0] = oldest[excess:].clone()
                slot.first += excess

    @torch.inference_mode()
    def start(self, slot: DraftSlot, tokens: Sequence[int]) -> EagleTree | None:
        """Take what waits into the window and begin a tree.

        Args:
            slot: The sequence's.
            tokens: All tokens of the sequence; the last one is the root.

        Returns:
            The tree; None where no hidden state tells of the root.
        """
        count = slot.waiting
        if not count or slot.first + count != len(tokens) - 1:
            return None
        if slot.first != slot.end:
            slot.stored, slot.base = 0, slot.first  # tokens between were never seen
        hidden = torch.cat(slot.pending)  # [n, H]
        after = torch.tensor(tokens[slot.first + 1 :])
        positions = torch.arange(slot.first, slot.first + count)
        self._make_room(slot, count)
        slot.end = slot.first
        for begin in range(0, count, CHUNK):
            rows = slice(begin, begin + CHUNK)
            seen = hidden[rows]
            if self._layout.kind == EAGLE3:
                seen = self._linear("fc", seen)  # [n, 3 H] to [n, H]
            out = self._run(slot, after[rows], seen, positions[rows], place=slot.stored, seen=None)
            slot.stored += out.shape[0]
            slot.end += out.shape[0]
        slot.first = slot.end
        slot.pending.clear()
        return EagleTree(self, slot, out[-1:])

    def _make_room(self, slot: DraftSlot, count: int) -> None:
        """Forget rows that no window holds any more, if the new ones and a tree would not fit behind them."""
        kept = min(slot.stored, (self._blocks + 1) * PAGE_TOKENS - 1)
        if slot.stored + count + MOST_NODES > self._kv.shape[3]:
            rows = self._kv[slot.index]
            rows[:, :, :kept] = rows[:, :, slot.stored - kept : slot.stored].clone()
            slot.stored = kept

    def _run(
        self,
        slot: DraftSlot,
        tokens: torch.Tensor,  # [n]
        hidden: torch.Tensor,  # [n, H]
        positions: torch.Tensor,  # [n]
        *,
        place: int,
        seen: torch.Tensor | None,
    ) -> torch.Tensor:
        """The layer's outputs ``[n, H]``; keys and values go to the slot's rows from ``place`` on.

        ``seen`` (bool ``[n, place - stored + n]``) says which rows behind ``stored`` a row of a tree sees; a chain sees all
        before it. Of the stored rows each sees its window.
        """
        a, count = self._a, len(tokens)
        x, normed = self._enter(tokens, hidden)
        qkv = self._linear("qkv", normed)
        q, k, v = qkv.split([a.q_width, a.kv_width, a.kv_width], 1)
        q, k = (
            self._rotate(self._head_normed(each.view(count, -1, a.head_dim), norm).transpose(0, 1), positions)
            for each, norm in ((q, "q_norm"), (k, "k_norm"))
        )
        rows = self._kv[slot.index]  # [2, kv_heads, rows, D]
        end = place + count
        rows[0, :, place:end] = k
        rows[1, :, place:end] = v.view(count, -1, a.head_dim).transpose(0, 1)
        # Row j of the stored ones is at position end - stored + j: what is stored is one run.
        base = slot.stored if seen is not None else place
        stored_positions = (
            torch.arange(slot.end - slot.stored, slot.end) if base else torch.empty(0, dtype=torch.int64)
        )
        if seen is None:
            seen = torch.ones(count, count, dtype=torch.bool).tril_()
            new_positions = positions
        else:
            new_positions = torch.full((seen.shape[1],), int(positions.min()))
        mask = torch.cat([torch.ones(count, base, dtype=torch.bool), seen], 1)
        all_positions = torch.cat([stored_positions, new_positions])
        all_blocks, blocks = (
            (each - slot.base).div(PAGE_TOKENS, rounding_mode="floor") for each in (all_positions, positions)
        )
        mask &= all_blocks[None, :] >= blocks[:, None] - self._blocks
        keys = rows[0, :, :end].float().repeat_interleave(a.group, 0)  # [heads, end, D]
        values = rows[1, :, :end].float().repeat_interleave(a.group, 0)
        scores = (q @ keys.transpose(1, 2) / math.sqrt(a.head_dim)).masked_fill_(~mask, -torch.inf)
        attended = (scores.softmax(-1) @ values).transpose(0, 1).reshape(count, a.q_width)
        x = x + a.residual_scale * self._linear("output", attended)
        gate, up = self._linear("gate_up", self._norm(x, self._w["mlp_norm"])).chunk(2, 1)
        x = x + a.residual_scale * self._linear("down", torch.nn.functional.silu(gate) * up)
        return self._norm(x, self._w["final_norm"]) if self._layout.feeds_normed else x

    def _enter(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream ``[n, H]`` and what attention sees: ``[n, H]``, or ``[n, 2 H]`` in EAGLE-3."""
        w = self._w
        embedded = self._embedding[tokens].float() * self._a.embedding_scale
        residual = hidden
        if "embedding_norm" in w:
            embedded = self._norm(embedded, w["embedding_norm"])
            hidden = self._norm(hidden, w["hidden_norm"])
        pair = torch.cat([hidden, embedded] if self._layout.hidden_first else [embedded, hidden], 1)
        if self._layout.kind == EAGLE3:
            return residual, pair
        x = self._linear("fc", pair)
        return x, self._norm(x, w["attention_norm"]) if "attention_norm" in w else x

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``[n, in]`` to ``[n, out]``."""
        packed = self._packed.get(name)
        if packed is None:
            out = x @ self._w[name].float().t()
        else:
            out = torch.empty(x.shape[0], packed.scales.shape[0])
            self._product(x, packed, out)
        bias = self._w.get(f"{name}_bias")
        return out if bias is None else out + bias

    def _head_normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """``[n, heads, D]``, normed where the draft has such a norm."""
        return self._norm(x, self._w[name]) if name in self._w else x

    def likeliest(self, out: torch.Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """The likeliest tokens after rows, from the layer's outputs ``[n, H]``, and their probabilities."""
        if "final_norm" in self._w and not self._layout.feeds_normed:
            out = self._norm(out, self._w["final_norm"])
        out = out / self._a.logit_divisor
        logits = (
            self._linear("head", out) if "head" in self._w else out @ self._head.float().t()
        )  # [n, V or fewer]
        # What overflows on the way drafts nothing, instead of ending the engine: a draft may be wrong, not harm.
        found = logits.softmax(-1).nan_to_num_(0.0).topk(min(count, logits.shape[1]), dim=1)
        ids = found.indices if self._map is None else self._map[found.indices]
        return ids.tolist(), found.values.tolist()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._a.norm_eps) * weight.float()

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``[heads, n, D]`` at positions ``[n]``."""
        angles = positions[:, None].float() * self._frequencies
        factor = self._a.rope.attention_factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class EagleTree:
    """A tree that a draft grows (:class:`edged.speculation.expansion.Expander`); valid until the sequence goes on.

    Args:
        eagle: The draft.
        slot: The sequence's.
        root: The layer's output for the root, ``[1, H]``.
    """

    def __init__(self, eagle: TorchEagle, slot: DraftSlot, root: torch.Tensor) -> None:
        self._eagle, self._slot = eagle, slot
        self._out = {-1: root}
        self._rows: dict[int, int] = {}  # node -> its row behind the stored ones
        self._above: dict[int, list[int]] = {-1: []}  # node -> rows of its ancestors and its own
        self._found: dict[int, tuple[list[int], list[float]]] = {}
        self._count = 0

    @torch.inference_mode()
    def expand(self, nodes: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Run the draft on nodes of one level."""
        first, self._count = self._count, self._count + len(nodes)
        seen = torch.zeros(len(nodes), self._count, dtype=torch.bool)
        for index, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
            self._above[node] = [*self._above[parent], first + index]
            seen[index, self._above[node]] = True
        # All of a level have one depth, so one position.
        depth = len(self._above[nodes[0]])
        positions = torch.full((len(nodes),), self._slot.end - 1 + depth)
        hidden = torch.cat([self._out[parent] for parent in parents])
        out = self._eagle._run(  # noqa: SLF001 - two halves of one thing
            self._slot, torch.tensor(tokens), hidden, positions, place=self._slot.stored + first, seen=seen
        )
        self._out.update(zip(nodes, out.split(1), strict=True))

    @torch.inference_mode()
    def likeliest(self, node: int, count: int) -> tuple[list[int], list[float]]:
        """The likeliest tokens after a node that was run."""
        if len(self._found.get(node, ((),))[0]) < count:  # of the whole level at once
            waiting = [each for each in self._out if len(self._found.get(each, ((),))[0]) < count]
            ids, chances = self._eagle.likeliest(torch.cat([self._out[each] for each in waiting]), count)
            self._found.update(zip(waiting, zip(ids, chances, strict=True), strict=True))
        found = self._found[node]
        return found[0][:count], found[1][:count]
