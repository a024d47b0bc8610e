"""A model over many sequences of one length side by side, on any device that torch has: for making data, not for serving.

Training a draft needs a model's continuations of thousands of prompts and its hidden states over them. All sequences stand at
the same position here, so keys and values lie in one rectangle without pages, and one CUDA graph repeats the step of one token.
Packed weights are widened when they are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from edged.checkpoint.packed import unpack_words
from edged.checkpoint.ternary import unpack_ternary_words
from edged.errors import InvalidArgumentError, UnsupportedError
from edged.executor.torch_weights import read_weights
from edged.models.architecture import Architecture
from edged.models.decoder import Decoder
from edged.models.weights import weight_specs

if TYPE_CHECKING:
    from pathlib import Path

    from edged.checkpoint.packed import PackedModule
    from edged.executor.base import Progress
    from edged.models.checkpoint import PackedLinear
    from edged.models.operators import Linear


_FEW_ROWS = 16
_DIGITS = 5


class BatchModel:
    """One model and room for some sequences.

    Args:
        folder: The model's.
        device: ``cpu``, or a device of torch's such as ``cuda``.
        dtype: Type of weights, keys and values; the residual stream and norms are fp32.
        sequences: Sequences side by side (B).
        length: Tokens of each (L).

    Raises:
        CheckpointError: The folder is refused.
        InvalidArgumentError: The device is not known.
        UnsupportedError: torch has no such device here.
    """

    def __init__(self, folder: Path, *, device: str, dtype: torch.dtype, sequences: int, length: int) -> None:
        self.architecture = Architecture.read(folder)
        self.device, self.dtype = device_of(device), dtype
        self.sequences, self.length = sequences, length
        self._folder = folder
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def load(self, progress: Progress) -> None:
        """Read the weights and make room."""
        a = self.architecture
        self.weights = {
            spec.name: torch.empty(
                spec.shape, dtype=self.dtype if len(spec.shape) > 1 else torch.float32, device=self.device
            )
            for spec in weight_specs(a)
        }

        def store(linear: PackedLinear, module: PackedModule) -> None:
            rows = self.weights[linear.weight][linear.start : linear.start + linear.shape.outputs]
            rows.copy_(torch.from_numpy(widened(module, rows.shape[1])))

        read_weights(self._folder, a, self.weights, progress, store)
        self._decoder = Decoder(a, self.weights)
        self._operators = BatchOperators(self)
        shape = (a.layers, 2, self.sequences, a.kv_heads, self.length, a.head_dim)
        self.kv = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._tokens = torch.zeros(self.sequences, 1, dtype=torch.int64, device=self.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self.device)

    @property
    def head(self) -> torch.Tensor:
        """The LM head ``[V, H]``, without the model's divisor."""
        return self._decoder.head.weight

    @property
    def embedding(self) -> torch.Tensor:
        """``[V, H]``, without the model's scale."""
        return self._decoder.embedding

    def inverse_frequencies(self) -> torch.Tensor:
        """Of the rotary embedding, fp32 ``[D / 2]``."""
        a = self.architecture
        return torch.from_numpy(a.rope.inverse_frequencies(a.head_dim, self.length)).to(self.device)

    @torch.inference_mode()
    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Store the first tokens ``[b, n]`` of up to B sequences; the final norm's outputs ``[b, n, H]``, fp32."""
        positions = torch.arange(tokens.shape[1], device=self.device)
        return self._run(tokens.to(self.device), positions, stored=tokens.shape[1])

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 ``[.., V]`` of the final norm's outputs ``[.., H]``."""
        scaled = (hidden / self.architecture.logit_divisor).to(self.dtype)
        return functional.linear(scaled, self.head).float()

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, position: int) -> torch.Tensor:
        """Store one more token of each of all B sequences.

        Args:
            tokens: ``[B]``.
            position: Theirs; all before it are stored.

        Returns:
            The logits after them, fp32 ``[B, V]``; on a GPU in place, so valid until the next call.
        """
        self._tokens[:, 0] = tokens
        self._position.fill_(position)
        if self.device.type != "cuda":
            return self.logits(self._run(self._tokens, self._position, stored=position + 1)[:, -1])
        if self._graph is None:
            self._capture()
        assert self._graph is not None  # noqa: S101
        self._graph.replay()
        return self._drawn_from

    def _capture(self) -> None:
        """Record the step of one token, which looks at the whole rectangle behind a mask."""

        def step() -> torch.Tensor:
            return self.logits(self._run(self._tokens, self._position, stored=self.length)[:, -1])

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()  # libraries set themselves up outside the recording
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._drawn_from = step()

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, stored: int) -> torch.Tensor:
        self._operators.begin(tokens, positions, stored)
        return self._decoder.forward(self._operators)


def device_of(name: str) -> torch.device:
    """A device by torch's name for it.

    Raises:
        InvalidArgumentError: It is neither ``cpu`` nor ``cuda``, with a number or without one.
        UnsupportedError: torch has no such device here.
    """
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (number.isdecimal() and len(number) < _DIGITS)):
        raise InvalidArgumentError(f"device {name!r} is not known: give cpu, cuda or cuda:1", field="device")
    if kind == "cuda" and not int(number or 0) < torch.cuda.device_count():
        raise UnsupportedError(
            f"torch finds {torch.cuda.device_count()} CUDA devices here, and {name} was asked for: install a torch that was "
            "built for CUDA, or take device cpu",
            field="device",
        )
    return torch.device(name)


class BatchOperators:
    """:class:`edged.models.operators.Operators` on a rectangle ``[B, n]`` of tokens.

    Args:
        model: Whose weights and room they use.
    """

    def __init__(self, model: BatchModel) -> None:
        self._model = model
        self._a = model.architecture
        self._frequencies = model.inverse_frequencies()

    def begin(self, tokens: torch.Tensor, positions: torch.Tensor, stored: int) -> None:
        """Prepare a step of tokens ``[b, n]`` at positions ``[n]``; attention looks at the first ``stored`` places."""
        self._tokens, self._positions, self._stored = tokens, positions, stored
        angles = positions[:, None].float() * self._frequencies
        factor = self._a.rope.attention_factor
        self._cos, self._sin = angles.cos() * factor, angles.sin() * factor
        seen = torch.arange(stored, device=positions.device) <= positions[:, None]  # [n, stored]
        self._mask = seen.repeat(self._a.group, 1)  # [group n, stored]

    def embedding(self, table: torch.Tensor, scale: float) -> torch.Tensor:
        """``[b, n, H]``."""
        rows = functional.embedding(self._tokens, table).float()
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``[.., H]``."""
        return functional.rms_norm(hidden, (hidden.shape[-1],), weight, self._a.norm_eps)

    def add_rms_norm(
        self, hidden: torch.Tensor, branch: torch.Tensor, scale: float, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[.., H]`` twice."""
        hidden = torch.add(hidden, branch, alpha=scale)
        return hidden, self.rms_norm(hidden, weight)

    def linear(self, x: torch.Tensor, layer: Linear[torch.Tensor]) -> torch.Tensor:
        """``[.., out]``."""
        if not x.is_cuda and x.numel() <= _FEW_ROWS * x.shape[-1]:  # the faster product there for few rows
            product = layer.weight @ x.flatten(0, -2).t().to(self._model.dtype)
            out: torch.Tensor = product.t().unflatten(0, x.shape[:-1])
            return out if layer.bias is None else out + layer.bias
        bias = None if layer.bias is None else layer.bias.to(self._model.dtype)
        return functional.linear(x.to(self._model.dtype), layer.weight, bias)

    def attention(
        self, qkv: torch.Tensor, layer: int, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> torch.Tensor:
        """``[b, n, (heads + 2 kv_heads) D]`` to ``[b, n, heads D]``."""
        a, (count, tokens) = self._a, qkv.shape[:2]
        q, k, v = (
            part.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)  # [b, heads, n, D]
            for part in qkv.split([a.q_width, a.kv_width, a.kv_width], -1)
        )
        q, k = self._rotated(q, q_norm), self._rotated(k, k_norm)
        keys, values = self._model.kv[layer, :, :count].unbind(0)  # [b, kv_heads, L, D]
        keys.index_copy_(2, self._positions, k)
        values.index_copy_(2, self._positions, v.contiguous())
        # The heads of a group are further queries of their KV head, so nothing is repeated.
        attended = functional.scaled_dot_product_attention(
            q.reshape(count, a.kv_heads, a.group * tokens, a.head_dim),
            keys[:, :, : self._stored],
            values[:, :, : self._stored],
            attn_mask=self._mask,
        )
        return attended.reshape(count, a.heads, tokens, a.head_dim).transpose(1, 2).flatten(2)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[.., I]``."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def needed_rows(self, x: torch.Tensor) -> torch.Tensor:
        """All of them."""
        return x

    def logits(self, hidden: torch.Tensor, head: Linear[torch.Tensor], divisor: float) -> torch.Tensor:  # noqa: ARG002
        """The final norm's outputs themselves: the caller says of which it wants logits."""
        return hidden

    def _rotated(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """``[b, heads, n, D]``, normed where there is a norm, and turned to the positions."""
        wide = x.float()
        if norm is not None:
            wide = self.rms_norm(wide, norm)
        first, second = wide.chunk(2, -1)
        turned = torch.cat(
            [first * self._cos - second * self._sin, second * self._cos + first * self._sin], -1
        )
        return turned.to(self._model.dtype)


def widened(module: PackedModule, inputs: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """A packed module's weight, fp32 ``[out, in]``: ``scale * (q - zero)``, or a ternary one's ``scale * (code - 1)``."""
    outputs, groups = module.scales.shape
    numbers = np.empty((outputs, inputs), np.float32)
    each = 8 if module.zeros is not None else 16
    for output, word, tile in module.tiles:
        part = unpack_words(tile) if each == 8 else unpack_ternary_words(tile)
        rows, words = tile.shape
        numbers[output : output + rows, each * word : each * (word + words)] = part.reshape(rows, -1)
    grouped = numbers.reshape(outputs, groups, -1)
    grouped -= 1.0 if module.zeros is None else module.zeros[:, :, None].astype(np.float32)
    grouped *= module.scales[:, :, None].astype(np.float32)
    if module.order is None:
        return numbers
    ordered = np.empty_like(numbers)  # column i of the packed integers belongs to input order[i]
    ordered[:, module.order] = numbers
    return ordered
