"""The decoder's operators over the whole calibration at once: a linear is quantized when the forward meets it.

What an operator returns is a recipe for each batch, computed when it is asked for and again when it is asked for again;
only the hidden states between the halves of layers are kept, on the disk. So a linear sees the inputs that come through
everything that was quantized before it, and no more than half a layer of weights is in memory.

S sequences of L tokens are in a batch; H, D, I and V are as in :mod:`edged.models.decoder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from edged.errors import CheckpointError
from edged.models.weights import HEAD
from edged.quantize.gptq import quantize_weight
from edged.quantize.gptq_files import module_tensors
from edged.quantize.smoothing import find_scales
from edged.quantize.state import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from edged.models.operators import Linear
    from edged.models.weights import WeightSpec
    from edged.quantize.calibration import Tokens
    from edged.quantize.gptq import QuantizedWeight
    from edged.quantize.recipe import Recipe
    from edged.quantize.source import Source
    from edged.quantize.state import Results, State

    Done = Callable[[str, int], None]
    """Told the name of a linear that is finished, and how many are."""

BATCH_TOKENS = 2048
_TABLE_ROWS = 4096
_STAGES_A_LAYER = 2


@dataclass(frozen=True)
class Batches:
    """Activations, batch by batch: ``compute(index)`` is ``[S, L, width]``.

    Attributes:
        compute: Gives one batch.
        divide: Divides the channels by numbers of their own in what makes them, and returns the numbers that they were
            really divided by; None where nothing can.
        ties: Makes equal what can only be divided together.
    """

    compute: Callable[[int], torch.Tensor]
    divide: Callable[[torch.Tensor], torch.Tensor] | None = None
    ties: Callable[[torch.Tensor], torch.Tensor] = lambda scales: scales


@dataclass
class _Made:
    """A linear of the half that is under way."""

    spec: WeightSpec
    weight: QuantizedWeight


class CalibrationOperators:
    """Quantizes every linear of a model in one pass of the decoder's forward. Weights' handles are their specs.

    Args:
        source: The dense checkpoint.
        recipe: How.
        sequences: Token ids ``[S, L]``.
        state: Takes results, and gives what an earlier run finished.
        device: Where it is computed.
        done: Progress.
    """

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        sequences: Tokens,
        *,
        state: State,
        device: torch.device,
        done: Done,
    ) -> None:
        self._source = source
        self._a = source.architecture
        self._recipe = recipe
        self._tokens = torch.from_numpy(sequences)  # [S, L]
        self._state = state
        self._device = device
        self._done = done
        self._shape = (*sequences.shape, self._a.hidden)
        step = max(1, BATCH_TOKENS // sequences.shape[1])
        self._batches = [slice(start, start + step) for start in range(0, len(sequences), step)]
        self._made: dict[str, _Made] = {}
        self._finished = state.stages
        if self._finished and self._finished <= self._all_stages and self._stored(self._finished) is None:
            state.restart()  # hidden states were taken away
            self._finished = 0
        for files in state.results():
            source.restore(files)
        self._stage = 0
        self._linears = 0
        self._positions()

    @property
    def _all_stages(self) -> int:
        return _STAGES_A_LAYER * self._a.layers

    def embedding(self, table: WeightSpec, scale: float) -> Batches:
        """The embeddings of every sequence are the first hidden states."""
        if not self._finished and self._stored(0) is None:
            with self._state.write_hidden(0, self._shape) as content:
                hidden = torch.from_numpy(content)  # [S, L, H]
                for start, rows in self._source.row_pieces(table.sources[0].name, _TABLE_ROWS):
                    here = (self._tokens >= start) & (self._tokens < start + len(rows))
                    hidden[here] = rows[self._tokens[here] - start] * scale
        return self._hidden()

    def rms_norm(self, hidden: Batches, weight: WeightSpec) -> Batches:
        """A norm, which what follows it may divide."""

        def compute(batch: int) -> torch.Tensor:
            x = hidden.compute(batch)
            return _rms_norm(x, self._source.vector(weight).to(self._device), self._a.norm_eps)

        def divide(scales: torch.Tensor) -> torch.Tensor:
            return self._source.divide(weight.sources[0], scales.cpu()).to(self._device)

        return Batches(compute, divide)

    def add_rms_norm(
        self, hidden: Batches, branch: Batches, scale: float, weight: WeightSpec
    ) -> tuple[Batches, Batches]:
        """The end of a half: hidden states and results go to the disk."""
        if self._stage >= self._finished:
            with self._state.write_hidden(self._stage + 1, self._shape) as content:
                for index, batch in enumerate(self._batches):
                    result = hidden.compute(index) + scale * branch.compute(index)
                    content[batch] = result.cpu().numpy()
            self._commit()
        self._stage += 1
        hidden = self._hidden()
        return hidden, self.rms_norm(hidden, weight)

    def linear(self, x: Batches, layer: Linear[Any]) -> Batches:
        """Quantize a linear with the inputs that it has; then it is the quantized one."""
        self._linears += 1
        if self._stage < self._finished:
            self._done(layer.name, self._linears)
            return _NOTHING
        made = self._quantize(x, layer.weight, layer.name)
        self._made[layer.part] = made
        self._done(layer.name, self._linears)

        def compute(batch: int) -> torch.Tensor:
            bias = None if layer.bias is None else self._source.vector(layer.bias).to(self._device)
            return functional.linear(x.compute(batch), made.weight.dense, bias)

        return Batches(compute)

    def attention(
        self,
        qkv: Batches,
        layer: int,  # noqa: ARG002 - sequences attend to themselves: there are no pages
        q_norm: WeightSpec | None,
        k_norm: WeightSpec | None,
    ) -> Batches:
        """Causal attention of each sequence to itself."""
        a = self._a

        def compute(batch: int) -> torch.Tensor:
            q, k, v = (
                part.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)  # [S, heads, L, D]
                for part in qkv.compute(batch).split([a.q_width, a.kv_width, a.kv_width], dim=-1)
            )
            if q_norm is not None and k_norm is not None:
                q = _rms_norm(q, self._source.vector(q_norm).to(self._device), a.norm_eps)
                k = _rms_norm(k, self._source.vector(k_norm).to(self._device), a.norm_eps)
            q, k = self._rotate(q), self._rotate(k)
            k, v = (each.repeat_interleave(a.group, dim=1) for each in (k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return attended.transpose(1, 2).flatten(2)  # [S, L, heads D]

        def ties(scales: torch.Tensor) -> torch.Tensor:
            """A value channel is an input of the output projection for each query head of its group."""
            heads = scales.view(a.kv_heads, a.group, a.head_dim)
            return heads.amax(dim=1, keepdim=True).expand_as(heads).reshape(-1)

        def divide(scales: torch.Tensor) -> torch.Tensor:
            return self._divide_rows("qkv", a.q_width + a.kv_width, scales, ties_to=a.group)

        return Batches(compute, divide, ties)

    def silu_mul(self, gate_up: Batches) -> Batches:
        """``silu(gate) * up``; up can be divided."""

        def compute(batch: int) -> torch.Tensor:
            gate, up = gate_up.compute(batch).chunk(2, dim=-1)
            return functional.silu(gate) * up

        return Batches(
            compute, lambda scales: self._divide_rows("gate_up", self._a.intermediate, scales, ties_to=1)
        )

    def needed_rows(self, x: Batches) -> Batches:
        """Every row is needed."""
        return x

    def logits(self, hidden: Batches, head: Linear[Any], divisor: float) -> Batches:
        """The LM head, where it is to be quantized."""
        if self._recipe.covers(head.weight) and self._state.stages <= self._all_stages:
            x = Batches(lambda batch: hidden.compute(batch) / divisor, hidden.divide)
            self._made[HEAD] = self._quantize(x, head.weight, head.name)
            self._commit()
        return _NOTHING

    def _hidden(self) -> Batches:
        """The hidden states before the stage that comes next."""
        stage = self._stage

        def compute(batch: int) -> torch.Tensor:
            stored = self._stored(stage)
            if stored is None:
                raise CheckpointError(f"{self._state.folder}: hidden states {stage} are gone")
            return torch.from_numpy(stored[self._batches[batch]].copy()).to(self._device)

        return Batches(compute)

    def _stored(self, stage: int) -> Any:  # noqa: ANN401 - a mapped array
        return self._state.hidden(stage, self._shape)

    def _quantize(self, x: Batches, spec: WeightSpec, name: str) -> _Made:
        hessian, activation, left_out = self._statistics(x, spec.shape[1], name)
        weight = self._source.matrix(spec).to(self._device)
        if self._recipe.smooths and x.divide is not None:
            scales = find_scales(weight, hessian, activation, self._recipe, x.ties)
            scales = x.divide(scales)
            weight *= scales
            hessian /= scales.unsqueeze(0) * scales.unsqueeze(1)
            left_out /= scales.square()
        return _Made(spec, quantize_weight(weight, hessian, self._recipe, name, left_out))

    def _statistics(
        self, x: Batches, inputs: int, name: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``X.T X`` ``[K, K]`` and the mean size of each channel ``[K]``, without the positions that are left out.

        The third is what those would add to the diagonal, ``[K]``. All three are over the number of rows that count.
        """
        hessian = torch.zeros(inputs, inputs, device=self._device)
        activation = torch.zeros(inputs, device=self._device)
        left_out = torch.zeros(inputs, device=self._device)
        count = 0
        for batch in range(len(self._batches)):
            every = x.compute(batch)  # [S, L, K]
            rows = every[:, self._recipe.skipped :].flatten(0, 1)  # [rows, K]
            hessian.addmm_(rows.t(), rows)
            activation += rows.abs().sum(dim=0)
            left_out += every[:, : self._recipe.skipped].square().sum(dim=(0, 1))
            count += len(rows)
        if not bool((activation + left_out).isfinite().all()):
            raise SourceError(
                f"{name}: its inputs hold NaN or infinity; download or convert the source again (bfloat16 or "
                "float32 hold what float16 cannot)"
            )
        return hessian / count, activation / count, left_out / count

    def _divide_rows(self, part: str, start: int, scales: torch.Tensor, *, ties_to: int) -> torch.Tensor:
        """Divide outputs of a linear of this half, and its bias; returns the numbers of the input channels."""
        made, a = self._made[part], self._a
        rows = scales.view(-1, ties_to, a.head_dim)[:, 0].reshape(-1) if ties_to > 1 else scales
        held = made.weight.divide_rows(start, rows)
        if not bool(held):
            raise SourceError(
                f"{made.spec.name}: its scales leave the range of float16 when they are smoothed"
            )
        for spec in self._biases(made.spec.name):
            for source in spec.sources:
                if source.start == start:
                    self._source.divide(source, rows.cpu())
        return scales

    def _biases(self, name: str) -> list[WeightSpec]:
        return [spec for spec in self._source.specs if spec.name == f"{name}_bias"]

    def _commit(self) -> None:
        results: Results = {}
        for made in self._made.values():
            for source in made.spec.sources:
                results |= module_tensors(source, made.weight)
        results |= self._source.take_changed()
        self._state.commit(self._state.stages, results)
        self._made.clear()

    def _positions(self) -> None:
        length = self._tokens.shape[1]
        rope = self._a.rope
        frequencies = torch.from_numpy(rope.inverse_frequencies(self._a.head_dim, length))
        angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)  # [L, D / 2]
        self._cos = (angles.cos() * rope.attention_factor).to(self._device)
        self._sin = (angles.sin() * rope.attention_factor).to(self._device)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate ``[S, heads, L, D]``; halves of a head are its pairs."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat(
            [first * self._cos - second * self._sin, second * self._cos + first * self._sin], dim=-1
        )


def _nothing(_batch: int) -> torch.Tensor:
    raise AssertionError("computed in a stage that an earlier run finished")


_NOTHING = Batches(_nothing)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight
