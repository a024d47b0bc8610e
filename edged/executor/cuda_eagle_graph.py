"""What a run of a draft enqueues: the layer over rows of stored tokens, then over the levels of a tree."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from edged.executor.cuda_angles import fill_angles
from edged.executor.cuda_linear import CudaLinear
from edged.executor.cuda_packed import tensors_of
from edged.memory.cuda_draft import DraftLayout, DraftSizes, draft_packed
from edged.models.operators import Linear
from plugins_trt.append.contract import Append
from plugins_trt.arena import Arena, Pool
from plugins_trt.contract import MAX_DECODE, Batch, DeviceArray
from plugins_trt.decode_attention.contract import DecodeAttention
from plugins_trt.draft_input.contract import DraftInput
from plugins_trt.draft_take.contract import DraftTake
from plugins_trt.draft_tree.contract import DraftGrow, DraftTop
from plugins_trt.embedding.contract import Embedding
from plugins_trt.rms_norm.contract import RmsNorm
from plugins_trt.silu_mul.contract import SiluMul

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.executor.cuda_device import StepKernels
    from edged.executor.cuda_draft_kernels import DraftKernels
    from edged.memory.buffers import ModelPlan

_of = DeviceArray.of


class DraftGraph:
    """The launches of one draft.

    Args:
        plan: The model's plan, which has a draft.
        buffers: Every buffer of the plan, by name.
        kernels: The target's operators.
        draft_kernels: The draft's.
        head: The target's LM head.
    """

    def __init__(
        self,
        plan: ModelPlan,
        buffers: Mapping[str, torch.Tensor],
        kernels: StepKernels,
        draft_kernels: DraftKernels,
        head: Linear[torch.Tensor],
    ) -> None:
        assert plan.draft is not None, "asked of a plan with a draft"  # noqa: S101
        self._a, self._sizes, self._kernels, self._draft = (
            plan.draft.eagle.layer,
            DraftSizes.of(plan),
            kernels,
            draft_kernels,
        )
        self._b = {
            name.removeprefix("draft."): each for name, each in buffers.items() if name.startswith("draft.")
        }
        self._embedding, self._hidden = (
            buffers["embedding"],
            buffers["normed"].view(-1, plan.architecture.hidden),
        )
        self._drawn = buffers["drawn"]
        own = "cosine" in self._b
        self._angles = [(self._b if own else buffers)[each] for each in ("cosine", "sine")]
        self._context_length = plan.context_length
        self._head = Linear("draft.head", "head", self._b["head"]) if "head" in self._b else head
        scratch = {"packed_workspace": self._b["packed_workspace"]} if "packed_workspace" in self._b else {}
        packed = tensors_of(draft_packed(plan.draft), buffers)
        self._linear = CudaLinear(replace(kernels, packed=draft_kernels.packed), packed, scratch)
        self._arena = self._make_arena(plan)
        step, at = self._b["step"], DraftLayout.of(self._sizes)

        def part(start: int, count: int) -> torch.Tensor:
            return step[start : start + count]

        self._token_ids, self._hidden_rows, self._positions = (
            part(each, MAX_DECODE) for each in (at.token_ids, at.hidden_rows, at.positions)
        )
        self._masks = part(at.masks, 2 * MAX_DECODE).view(torch.int64)
        self._starts, self._lengths = part(at.starts, 2), part(at.lengths, 1)
        self._tree_lengths, self._root_row = part(at.tree_lengths, 1), part(at.root_row, 1)
        self._table = part(at.table, self._sizes.table).view(1, -1)

    def take_accepted(self, path: torch.Tensor, accepted: torch.Tensor) -> None:
        """Make the rows of what the step that has just run accepted, as the host stages them for :meth:`take`.

        Args:
            path: Rows of the step, int32 ``[64]``.
            accepted: How many, int32 ``[1]``.
        """
        self._draft.take(
            DraftTake(
                drawn=_of(self._drawn),
                path=_of(path),
                accepted=_of(accepted),
                lengths=_of(self._lengths),
                token_ids=_of(self._token_ids),
                hidden_rows=_of(self._hidden_rows),
                positions=_of(self._positions),
                starts=_of(self._starts),
                tree_lengths=_of(self._tree_lengths),
                root_row=_of(self._root_row),
            )
        )

    def fill(self) -> None:
        """Make what no file holds: where each level's rows begin among the nodes, and angles of its own."""
        width, levels = self._sizes.width, self._sizes.levels
        starts = [[-level * width, width] for level in range(levels)]
        self._b["starts"].copy_(torch.tensor(starts, dtype=torch.int32))
        self._b["one_token"][-1] = 1  # a path of row 0 alone
        if "cosine" in self._b:
            fill_angles(self._a, self._context_length, self._b["cosine"], self._b["sine"])

    def take(self, rows: int) -> None:
        """Rows of stored tokens, up to ``rows`` of them; the rest is padding."""
        batch = Batch(
            sequence_starts=_of(self._starts),
            lengths=_of(self._lengths),
            page_tables=_of(self._table),
            positions=_of(self._positions[:rows]),
            tree_masks=_of(self._masks[:rows]),
        )
        inputs = self._token_ids[:rows], self._hidden, self._hidden_rows[:rows], self._positions[:rows]
        self._layer(batch, inputs)

    def grow(self) -> None:
        """A whole tree below the row that was taken last."""
        width, levels = self._sizes.width, self._sizes.levels
        root = self._b["root"]
        self._kernels.embedding(Embedding(_of(self._root_row), _of(self._b["outs"]), _of(root), 1.0))
        self._children(root, 0)
        following = self._b["next"].view(3, -1)
        for level in range(levels - 1):
            here = slice(level * width, (level + 1) * width)
            token_ids, hidden_rows, positions = (each[here] for each in following)
            batch = Batch(
                sequence_starts=_of(self._b["starts"][level]),
                lengths=_of(self._tree_lengths),
                page_tables=_of(self._table),
                positions=_of(positions),
                tree_masks=_of(self._b["next_masks"][here]),
            )
            first = MAX_DECODE + level * width
            inputs = token_ids, self._b["outs"], hidden_rows, positions
            self._layer(batch, inputs, first=first, place=level * width)
            self._children(self._b["outs"][first : first + width], level + 1)

    def _layer(
        self,
        batch: Batch,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        first: int = 0,
        place: int = 0,
    ) -> None:
        """The layer over R rows.

        Args:
            batch: Where they are.
            inputs: Their token ids, int32 ``[R]``; hidden states ``[any, H]``; which of these are theirs, int32 ``[R]``; and
                their positions, int32 ``[R]``.
            first: Their outputs become the rows of ``outs`` from here on.
            place: Rows of ``qkv_out`` before theirs. A level's keys lie behind those of the levels above, where a kernel
                that makes keys of ancestors again finds them.
        """
        token_ids, hidden, hidden_rows, positions = inputs
        a, b, count = self._a, self._b, len(token_ids)
        blocks, counts = b["blocks"][:count], b["counts"][:count]
        joined = b["rows"][:count]
        self._draft.rows(
            DraftInput(
                embedding=_of(self._embedding),
                token_ids=_of(token_ids),
                hidden=_of(hidden),
                hidden_rows=_of(hidden_rows),
                positions=_of(positions),
                out=_of(joined),
                blocks=_of(blocks),
                counts=_of(counts),
                embedding_norm=_of(b["embedding_norm"]) if "embedding_norm" in b else None,
                hidden_norm=_of(b["hidden_norm"]) if "hidden_norm" in b else None,
                scale=a.embedding_scale,
                epsilon=a.norm_eps,
            )
        )
        out, normed, branch = b["outs"][first : first + count], b["normed"][:count], b["branch"][:count]
        self._linear(joined, Linear("draft.fc", "fc", b["fc"], b.get("fc_bias")), out)
        x = out
        if "attention_norm" in b:
            x = self._norm(out, b["attention_norm"], normed)
        qkv = self._linear(x, Linear("draft.qkv", "qkv", b["qkv"]), b["qkv_out"][place : place + count])
        self._linear(
            self._attention(batch, qkv, blocks, counts), Linear("draft.output", "output", b["output"]), branch
        )
        self._norm(out, b["mlp_norm"], normed, branch)
        gate_up = Linear("draft.gate_up", "gate_up", b["gate_up"])
        activated = b["activated"][:count]
        if self._linear.fuses(normed, gate_up):
            self._linear.gated(normed, gate_up, activated)
        else:
            wide = self._linear(normed, gate_up, b["gate_up_out"][:count])
            gate, up = wide[:, : a.intermediate], wide[:, a.intermediate :]
            self._kernels.silu_mul(SiluMul(_of(gate), _of(up), _of(activated)))
        self._linear(activated, Linear("draft.down", "down", b["down"]), branch)
        self._norm(out, b["mlp_norm"], normed, branch)  # for the sum: no norm follows the layer

    def _norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        branch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._kernels.rms_norm(
            RmsNorm(
                residual=_of(x),
                weight=_of(weight),
                out=_of(out),
                branch=None if branch is None else _of(branch),
                scale=1.0 if branch is None else self._a.residual_scale,
                epsilon=self._a.norm_eps,
            )
        )
        return out

    def _attention(
        self, batch: Batch, qkv: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        a, b, count = self._a, self._b, qkv.shape[0]
        heads = qkv.view(count, a.heads + 2 * a.kv_heads, a.head_dim)
        keys = a.heads + a.kv_heads
        queries = b["queries"][:count].view(count, a.heads, a.head_dim)
        attended = b["attended"][:count]
        self._draft.append(
            Append(
                batch=batch,
                arena=self._arena,
                layer=0,
                q=_of(heads[:, : a.heads]),
                k=_of(heads[:, a.heads : keys]),
                v=_of(heads[:, keys:]),
                q_out=_of(queries),
                cosine=_of(self._angles[0]),
                sine=_of(self._angles[1]),
                epsilon=a.norm_eps,
                node_fine=_of(b["nodes"][0, :count]),
                node_coarse=_of(b["nodes"][1, :count]),
            )
        )
        self._draft.attend(
            DecodeAttention(
                batch=batch,
                arena=self._arena,
                layer=0,
                q=_of(queries),
                out=_of(attended.view(count, a.heads, a.head_dim)),
                workspace=_of(b["workspace"]),
                blocks=_of(blocks),
                counts=_of(counts),
            )
        )
        return attended

    def _children(self, outs: torch.Tensor, level: int) -> None:
        """Children of a level, below rows whose outputs are ``[R, H]``, and what runs next."""
        sizes, b, rows = self._sizes, self._b, outs.shape[0]
        logits = self._linear.logits(outs, self._head, b["logits"][:rows], 1.0 / self._a.logit_divisor)
        candidates, statistics = b["candidates"][:rows], b["statistics"][:rows]
        self._draft.top(DraftTop(_of(logits), _of(candidates), _of(statistics)))
        tokens, parents, chances = b["pool"].view(3, -1)
        joint, nodes = b["frontier"].view(2, -1)
        token_ids, hidden_rows, positions = b["next"].view(3, -1)
        self._draft.grow(
            DraftGrow(
                candidates=_of(candidates),
                statistics=_of(statistics),
                lengths=_of(self._tree_lengths),
                root_row=_of(self._root_row),
                tokens=_of(tokens),
                parents=_of(parents),
                chances=_of(chances.view(torch.float32)),
                joint=_of(joint.view(torch.float32)),
                nodes=_of(nodes),
                token_ids=_of(token_ids),
                hidden_rows=_of(hidden_rows),
                positions=_of(positions),
                masks=_of(b["next_masks"]),
                level=level,
                levels=sizes.levels,
                first_row=MAX_DECODE,
                token_map=_of(b["map"]) if "map" in b else None,
            )
        )

    def _make_arena(self, plan: ModelPlan) -> Arena:
        """Pages of the draft; compressed keys have one place, which everybody overwrites and nobody reads."""
        a, pages = self._a, plan.max_sequences * self._sizes.pages

        def pool(name: str) -> Pool:
            head = 64 * a.head_dim
            return Pool(self._b[name].data_ptr(), pages * a.kv_heads * head, a.kv_heads * head, head)

        fine, coarse = (Pool(each.data_ptr(), 0, 0, 0) for each in self._b["unread"])
        return Arena(1, pages, a.kv_heads, a.head_dim, plan.dtype, pool("keys"), pool("values"), fine, coarse)
