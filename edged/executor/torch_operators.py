"""The decoder's operators in torch, on buffers that were allocated when the model was loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edged.executor.torch_attention import CpuAttention
from edged.executor.torch_linear import CpuLinear
from edged.executor.torch_packed import packed_weights
from edged.executor.torch_views import FEATURE_MAJOR_ROWS, LinearViews, StepViews, head_views
from edged.memory.draft_plan import STATES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from edged.executor.base import StepBatch
    from edged.models.decoder import Decoder
    from edged.models.operators import Linear
    from plugins_trt.contract import SelectionRule


class TorchOperators:
    """:class:`edged.models.operators.Operators` on torch tensors, for one loaded model.

    Args:
        decoder: The model, its weights loaded.
        buffers: The flat buffers of the plan, by name.
        inverse_frequencies: Of the rotary embedding, fp32 ``[D / 2]``.
        head_rows: Rows of logits that the ``logits`` buffer holds.
        rule: Which blocks a query attends to; None attends to everything.
        keeps_hidden: Whether the final norm's output is wanted of every row (:attr:`hidden`).
        kept_layers: Layers whose inputs are wanted of every row (:attr:`states`), into the buffer ``draft.states``.
    """

    def __init__(
        self,
        decoder: Decoder[torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        inverse_frequencies: torch.Tensor,
        head_rows: int,
        rule: SelectionRule | None = None,
        *,
        keeps_hidden: bool = False,
        kept_layers: Sequence[int] = (),
    ) -> None:
        self._keeps_hidden = keeps_hidden
        self._kept_layers = tuple(kept_layers)
        self._a = decoder.architecture
        self._buffers = buffers
        self._head_rows = head_rows
        self._attention = CpuAttention(self._a, buffers, inverse_frequencies, rule)
        linears = [
            part for layer in decoder.layers for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        self._linear = CpuLinear([*linears, decoder.head], buffers, packed_weights(self._a, buffers))
        self._qk_norms = tuple(
            None
            if layer.q_norm is None or layer.k_norm is None
            else _head_weights(layer.q_norm, layer.k_norm, self._a.heads, self._a.kv_heads)
            for layer in decoder.layers
        )
        compute = buffers["hidden"].dtype
        self._eps = torch.tensor(self._a.norm_eps, dtype=compute, device=buffers["hidden"].device)
        self.hidden = buffers["normed"][:0].view(0, self._a.hidden)
        """The final norm's output of the last step's rows, ``[T, H]``, where it is kept."""
        self._gives_hidden = False
        self._is_gated = False
        self.states = buffers["normed"][:0].view(0, self._a.hidden)
        """What entered each of the kept layers in the last step, side by side: ``[T, layers H]``."""
        self._step_views: dict[tuple[int, str], StepViews] = {}
        self._head_views: dict[int, LinearViews] = {}

    def begin(
        self, batch: StepBatch, consume: Callable[[int, torch.Tensor], None], *, gives_hidden: bool = False
    ) -> None:
        """Prepare a step.

        Args:
            batch: The step.
            consume: Called in :meth:`logits` with (first needed row, logits of some rows ``[n, V]``); the logits are
                overwritten after it returns.
            gives_hidden: It is called once with the final norm's output ``[R, H]`` instead.
        """
        self._gives_hidden = gives_hidden
        tokens, needed = len(batch.token_ids), len(batch.logit_rows)
        self._consume = consume
        self._token_ids = self._buffers["token_ids"][:tokens]
        self._token_ids.copy_(torch.from_numpy(batch.token_ids))
        self._needed: torch.Tensor | None = None
        self._views = self._views_of(tokens)
        if needed != tokens:
            self._needed = self._buffers["needed"][:needed]
            self._needed.copy_(torch.from_numpy(batch.logit_rows))
            self._needed_views = self._views_of(needed, "needed_")
        self._all_views = self._views
        self._attention.begin(batch, self._views.qkv, self._views.attended)

    def keep(self, batch: StepBatch, paths: Mapping[int, Sequence[int]]) -> None:
        """Keep the accepted nodes of the step's trees, by the sequence; the step has run."""
        self._attention.keep(batch, paths)

    def embedding(self, table: torch.Tensor, scale: float) -> torch.Tensor:
        """``[V, H]`` to ``[T, H]``."""
        tokens = self._views.rows
        rows = self._buffers["embedded"][: tokens * self._a.hidden].view(tokens, self._a.hidden)
        torch.index_select(table, 0, self._token_ids, out=rows)
        hidden = self._views.hidden
        hidden.copy_(rows)
        return hidden if scale == 1.0 else hidden.mul_(scale)

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[rows, H]`` to ``[rows, H]``."""
        views = self._views
        scale = views.norm_scale  # [rows, 1]
        torch.linalg.vector_norm(hidden, dim=1, keepdim=True, out=scale)
        torch.addcmul(self._eps, scale, scale, value=1.0 / self._a.hidden, out=scale)
        torch.mul(hidden, scale.rsqrt_(), out=views.normed)
        return views.normed.mul_(weight)

    def add_rms_norm(
        self, hidden: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[rows, H]`` twice; adds in place."""
        hidden.add_(branch, alpha=scale)
        return hidden, self.rms_norm(hidden, weight)

    def linear(self, x: torch.Tensor, layer: Linear[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002 - always the views' input
        """``[rows, in]`` to ``[rows, out]``."""
        views = self._views
        self._is_gated = views.narrow and layer.part == "gate_up" and layer.bias is None
        if self._is_gated:  # the result of silu_mul, which follows, is made while the product is at hand
            self._linear.gated(views.linears[layer.part], layer, views.activated)
            return views.gate_up
        return self._linear(views.linears[layer.part], layer)

    def attention(
        self,
        qkv: torch.Tensor,  # noqa: ARG002 - always the views' qkv
        layer: int,
        q_norm: torch.Tensor | None,  # noqa: ARG002 - joined with k_norm when the model was loaded
        k_norm: torch.Tensor | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """``[T, (heads + 2 kv_heads) D]`` to ``[T, heads D]``."""
        if layer in self._kept_layers:
            self._keep_state(layer)
        self._attention.run(layer, self._qk_norms[layer])
        return self._views.attended

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - always the views' gate_up
        """``[rows, 2 I]`` to ``[rows, I]``."""
        views = self._views
        if self._is_gated:
            return views.activated
        torch.nn.functional.silu(views.gate, inplace=True)
        if views.narrow:
            return views.activated.copy_(views.gate.mul_(views.up))
        return torch.mul(views.gate, views.up, out=views.activated)

    def needed_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, ..]`` to ``[R, ..]``; every later operator works on the needed rows."""
        if self._needed is None or self._keeps_hidden:
            return x
        self._views = self._needed_views
        target = self._views.hidden if x is self._all_views.hidden else self._views.attended
        return target.copy_(x.index_select(0, self._needed))

    def logits(self, hidden: torch.Tensor, head: Linear[torch.Tensor], divisor: float) -> torch.Tensor:
        """``[R, H]`` to ``[R, V]``, given to the step's consumer in groups that fit the logits buffer."""
        logits = self._buffers["logits"][:0].view(0, self._a.vocabulary)
        if self._keeps_hidden:
            self.hidden = hidden
            if self._needed is not None:
                hidden = hidden.index_select(0, self._needed)
        if self._gives_hidden:
            self._consume(0, hidden)
            return logits
        for first in range(0, hidden.shape[0], self._head_rows):
            rows = hidden[first : first + self._head_rows]
            views = self._head_views_of(rows.shape[0])
            torch.div(rows, divisor, out=views.x)
            logits = self._linear(views, head)
            self._consume(first, logits)
        return logits

    def _keep_state(self, layer: int) -> None:
        """The residual stream as it enters a layer; no row was left out before the last layer's attention."""
        hidden, width = self._all_views.hidden, self._a.hidden
        rows = hidden.shape[0]
        self.states = self._buffers[STATES][: rows * width * len(self._kept_layers)].view(rows, -1)
        for place, kept in enumerate(self._kept_layers):
            if kept == layer:
                self.states[:, place * width : (place + 1) * width].copy_(hidden)

    def _views_of(self, rows: int, prefix: str = "") -> StepViews:
        """Views for a number of rows; those of small steps, which come again and again, are kept."""
        views = self._step_views.get((rows, prefix))
        if views is None:
            linear = self._linear
            views = StepViews(
                self._buffers,
                self._a,
                rows,
                prefix,
                by_rows=linear.wants_rows,
                narrow=linear.wants_narrow,
            )
            if rows <= FEATURE_MAJOR_ROWS:
                self._step_views[rows, prefix] = views
        return views

    def _head_views_of(self, rows: int) -> LinearViews:
        views = self._head_views.get(rows)
        if views is None:
            views = self._head_views[rows] = head_views(self._buffers, self._a, rows)
        return views


def _head_weights(q_norm: torch.Tensor, k_norm: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Norm weights of all query and key heads, ``[heads + kv_heads, 1, D]``."""
    return torch.cat([q_norm.expand(heads, -1), k_norm.expand(kv_heads, -1)]).unsqueeze(1)
