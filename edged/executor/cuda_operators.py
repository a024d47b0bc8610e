"""The decoder's operators on a GPU, for one bucket: every call enqueues work on buffers that were made at load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edged.executor.cuda_linear import CudaLinear
from edged.executor.cuda_packed import packed_tensors
from edged.executor.kv_arena import arena_of
from edged.memory.cuda_buffers import StepLayout, logit_rows
from plugins_trt.attention.contract import Attention
from plugins_trt.contract import Batch, DeviceArray
from plugins_trt.embedding.contract import Embedding
from plugins_trt.rms_norm.contract import RmsNorm
from plugins_trt.sample.contract import Options, Sample
from plugins_trt.silu_mul.contract import SiluMul

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edged.executor.cuda_device import StepKernels
    from edged.memory.buffers import ModelPlan
    from edged.models.operators import Linear
    from plugins_trt.arena import Arena

_of = DeviceArray.of


def make_arena(plan: ModelPlan, buffers: Mapping[str, torch.Tensor]) -> Arena:
    """Where the kernels find keys, values and compressed keys of every layer."""
    return arena_of(plan, {name: buffer.data_ptr() for name, buffer in buffers.items()})


@dataclass(frozen=True)
class StepData:
    """What a step brings, as views of the one buffer that a copy fills; sizes are a bucket's."""

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    starts: torch.Tensor  # int32 [S + 1]
    lengths: torch.Tensor  # int32 [S]
    tables: torch.Tensor  # int32 [S, pages of a sequence]
    needed: torch.Tensor  # int32 [R]
    temperatures: torch.Tensor  # float32 [R]
    top_ks: torch.Tensor  # int32 [R]
    top_ps: torch.Tensor  # float64 [R]
    numbers: torch.Tensor  # float64 [R]
    masks: torch.Tensor | None  # int64 [T], where trees are verified
    given: torch.Tensor  # int32 [S], likewise

    @classmethod
    def of(
        cls, plan: ModelPlan, step: torch.Tensor, tokens: int, rows: int, *, trees: bool = False
    ) -> StepData:
        """Views of the buffer ``step`` for a bucket of ``tokens``, maybe of ``trees``, and ``rows`` of logits."""
        at = StepLayout.of(plan)

        def part(start: int, count: int) -> torch.Tensor:
            return step[start : start + count]

        pages = plan.pages_per_sequence
        return cls(
            token_ids=part(at.token_ids, tokens),
            positions=part(at.positions, tokens),
            starts=part(at.starts, plan.max_sequences + 1),
            lengths=part(at.lengths, plan.max_sequences),
            tables=part(at.tables, plan.max_sequences * pages).view(plan.max_sequences, pages),
            needed=part(at.needed, rows),
            temperatures=part(at.temperatures, rows).view(torch.float32),
            top_ks=part(at.top_ks, rows),
            top_ps=part(at.top_ps, 2 * rows).view(torch.float64),
            numbers=part(at.numbers, 2 * rows).view(torch.float64),
            masks=part(at.masks, 2 * tokens).view(torch.int64) if trees else None,
            given=part(at.given, plan.max_sequences if trees else 0),
        )

    @property
    def batch(self) -> Batch:
        """The kernels' view of it."""
        return Batch(
            sequence_starts=_of(self.starts),
            lengths=_of(self.lengths),
            page_tables=_of(self.tables),
            positions=_of(self.positions),
            tree_masks=None if self.masks is None else _of(self.masks),
        )


class CudaOperators:
    """:class:`edged.models.operators.Operators` for steps of one bucket.

    Args:
        plan: The model's plan.
        buffers: Every buffer of the plan, by name.
        kernels: The operators of the device.
        tokens: T, the bucket.
        every_row: The forward goes on with all T rows to its end, not with the needed ones.
        dense: No query of these steps is far enough to attend sparsely, so none scores blocks.
        sparse: Every query of these steps is, so nothing is launched for dense ones.
        trees: The tokens are nodes of trees, each of which needs its logits.
    """

    def __init__(
        self,
        plan: ModelPlan,
        buffers: Mapping[str, torch.Tensor],
        kernels: StepKernels,
        tokens: int,
        *,
        every_row: bool = False,
        dense: bool = False,
        sparse: bool = False,
        trees: bool = False,
    ) -> None:
        a = plan.architecture
        self._a = a
        self._buffers = buffers
        self._kernels = kernels
        self._linear = CudaLinear(kernels, packed_tensors(plan, buffers), buffers)
        self._rule = None if dense else plan.selection
        self._all_sparse = sparse
        self.rows = tokens if trees else logit_rows(plan, tokens)
        """R, rows of logits that come out."""
        self._gathers = not every_row and self.rows < tokens
        self._keeps_hidden = plan.draft is not None
        self.data = StepData.of(plan, buffers["step"], tokens, self.rows, trees=trees)
        self.arena = make_arena(plan, buffers)
        self.batch = self.data.batch
        self._all = self._views(tokens, "")
        self._needed = self._all
        if self._gathers and not self._keeps_hidden:
            self._needed = self._views(self.rows, "needed_")
        self._now = self._all
        self.normed = self._needed["normed"]
        """What the LM head sees when the forward has run, ``[R, H]``, or all T rows."""
        self.logits_out = buffers["logits"][: self.rows]

    def restart(self) -> None:
        """Before each forward."""
        self._now = self._all

    def embedding(self, table: torch.Tensor, scale: float) -> torch.Tensor:
        """``[V, H]`` to ``[T, H]``."""
        hidden = self._now["hidden"]
        self._kernels.embedding(Embedding(_of(self.data.token_ids), _of(table), _of(hidden), scale))
        return hidden

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[.., H]`` to ``[.., H]``."""
        return self._norm(hidden, weight, None, 1.0)

    def add_rms_norm(
        self, hidden: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[.., H]`` twice; adds in place."""
        return hidden, self._norm(hidden, weight, branch, scale)

    def linear(self, x: torch.Tensor, layer: Linear[torch.Tensor]) -> torch.Tensor:
        """``[.., in]`` to ``[.., out]``; where one kernel does both, :meth:`silu_mul` of gate and up comes along."""
        if layer.part == "gate_up" and self._linear.fuses(x, layer):
            self._linear.gated(x, layer, self._now["activated"])
            return self._now["activated"]
        out = self._now[{"qkv": "qkv", "gate_up": "gate_up"}.get(layer.part, "branch")]
        return self._linear(x, layer, out)

    def attention(
        self, qkv: torch.Tensor, layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """``[T, (heads + 2 kv_heads) D]`` to ``[T, heads D]``."""
        a, rows = self._a, qkv.shape[0]
        heads = qkv.view(rows, a.heads + 2 * a.kv_heads, a.head_dim)
        keys = a.heads + a.kv_heads
        attended = self._now["attended"]
        self._kernels.attention(
            Attention(
                batch=self.batch,
                arena=self.arena,
                layer=layer,
                q=_of(heads[:, : a.heads]),
                k=_of(heads[:, a.heads : keys]),
                v=_of(heads[:, keys:]),
                out=_of(attended.view(rows, a.heads, a.head_dim)),
                cosine=_of(self._buffers["cosine"]),
                sine=_of(self._buffers["sine"]),
                workspace=_of(self._buffers["attention_workspace"]),
                arrived=_of(self._buffers["arrived"]),
                q_norm=None if q_norm is None else _of(q_norm),
                k_norm=None if k_norm is None else _of(k_norm),
                epsilon=a.norm_eps,
                rule=self._rule,
                all_sparse=self._all_sparse,
            )
        )
        return attended

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[.., 2 I]`` to ``[.., I]``."""
        size, out = self._a.intermediate, self._now["activated"]
        if gate_up is out:
            return out  # :meth:`linear` went on to this
        self._kernels.silu_mul(SiluMul(_of(gate_up[:, :size]), _of(gate_up[:, size:]), _of(out)))
        return out

    def needed_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, ..]`` to ``[R, ..]``: a gather, which is what the embedding kernel does."""
        if not self._gathers or self._keeps_hidden:
            return x
        name = "hidden" if x is self._all["hidden"] else "attended"
        self._now = self._needed
        out = self._needed[name]
        self._kernels.embedding(Embedding(_of(self.data.needed), _of(x), _of(out)))
        return out

    def logits(self, hidden: torch.Tensor, head: Linear[torch.Tensor], divisor: float) -> torch.Tensor:
        """``[R, H]`` to fp32 ``[R, V]``; of all T rows, the first R."""
        if self._gathers and self._keeps_hidden:
            needed = self._buffers["needed_hidden"][: self.rows * self._a.hidden].view(self.rows, -1)
            self._kernels.embedding(Embedding(_of(self.data.needed), _of(hidden), _of(needed)))
            hidden = needed
        return self._linear.logits(hidden[: self.rows], head, self.logits_out, 1.0 / divisor)

    def sampling(self, drawn: torch.Tensor, *, options: bool = False) -> Sample:
        """How the rows that have a temperature, or ``options``, are drawn from :attr:`logits_out` into ``drawn``, int32 ``[R]``."""
        data, buffers = self.data, self._buffers
        return Sample(
            logits=_of(self.logits_out),
            temperatures=_of(data.temperatures),
            top_ks=_of(data.top_ks),
            top_ps=_of(data.top_ps),
            numbers=_of(data.numbers),
            ids=_of(drawn),
            workspace=_of(buffers["sample_workspace"]),
            largest_known=True,
            options=Options(
                rows=_of(buffers["sample_rows"][: self.rows]),
                entries=_of(buffers["sample_entries"]),
                raw=_of(buffers["sample_raw"]),
                masks=_of(buffers["sample_masks"]),
                logprobs=_of(buffers["sample_logprobs"][: self.rows]),
            )
            if options
            else None,
        )

    def one_row_of_logits(self, hidden: torch.Tensor, head: Linear[torch.Tensor], divisor: float) -> None:
        """``[1, H]`` into the first row of the logits."""
        self._linear.logits(hidden, head, self.logits_out[:1], 1.0 / divisor)

    def _norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, branch: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        normed = self._now["normed"]
        self._kernels.rms_norm(
            RmsNorm(
                residual=_of(hidden),
                weight=_of(weight),
                out=_of(normed),
                branch=None if branch is None else _of(branch),
                scale=scale,
                epsilon=self._a.norm_eps,
            )
        )
        return normed

    def _views(self, rows: int, prefix: str) -> dict[str, torch.Tensor]:
        """The activations of ``rows`` tokens; the needed rows' must not overwrite what they are taken from."""
        a = self._a
        widths = {
            "hidden": a.hidden,
            "normed": a.hidden,
            "qkv": a.qkv_width,
            "attended": a.q_width,
            "branch": a.hidden,
            "gate_up": 2 * a.intermediate,
            "activated": a.intermediate,
        }
        return {
            name: self._buffers[prefix + name if prefix + name in self._buffers else name][
                : rows * width
            ].view(rows, width)
            for name, width in widths.items()
        }
