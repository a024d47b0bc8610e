"""Steps on a GPU that go on with every row to their end, not with the needed ones alone: the same work, not captured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from edged.executor.cuda_operators import CudaOperators
from edged.memory.specs import ELEMENT_BYTES
from plugins_trt.contract import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from edged.executor.base import FloatArray, StepBatch
    from edged.executor.cuda_device import Device, StepKernels
    from edged.executor.cuda_staging import Staging
    from edged.memory.buffers import ModelPlan
    from edged.models.decoder import Decoder


class EveryRow:
    """Runs such steps.

    Args:
        plan: The model's plan.
        buffers: Every buffer of the plan, by name.
        device: Copies.
        kernels: Its operators.
        decoder: The forward.
        staging: Writes a step's data.
        keeps_hidden: Whether :meth:`hidden_states` will be asked for.
    """

    def __init__(  # noqa: PLR0917 - the parts of an executor
        self,
        plan: ModelPlan,
        buffers: Mapping[str, torch.Tensor],
        device: Device,
        kernels: StepKernels,
        decoder: Decoder[torch.Tensor],
        staging: Staging,
        *,
        keeps_hidden: bool,
    ) -> None:
        self._plan, self._buffers, self._device, self._kernels = plan, buffers, device, kernels
        self._decoder, self._staging = decoder, staging
        states = plan.step_tokens * plan.architecture.hidden * ELEMENT_BYTES[plan.dtype]
        self._hidden = device.host_words(ceil_div(states, ELEMENT_BYTES["int32"]) if keeps_hidden else 0)

    @torch.inference_mode()
    def logits(self, batch: StepBatch, tokens: int, fetch: Callable[[int], FloatArray]) -> FloatArray:
        """Logits of the needed rows, fp32 ``[R, V]``, one row after the other.

        Args:
            batch: The step.
            tokens: Its bucket.
            fetch: Gives a row of logits that was enqueued last.
        """
        a = self._plan.architecture
        result = np.empty((len(batch.logit_rows), a.vocabulary), np.float32)
        with self._device.scope():
            operators = self._run(batch, tokens)
            for index, row in enumerate(batch.logit_rows.tolist()):
                hidden = operators.normed[row : row + 1]
                operators.one_row_of_logits(hidden, self._decoder.head, a.logit_divisor)
                result[index] = fetch(0)
        return result

    @torch.inference_mode()
    def hidden_states(self, batch: StepBatch, tokens: int) -> FloatArray:
        """The final norm's output at the needed rows, fp32 ``[R, H]``."""
        with self._device.scope():
            normed = self._run(batch, tokens).normed[: len(batch.token_ids)]  # [T, H]
            words = self._hidden[: ceil_div(normed.numel() * normed.element_size(), ELEMENT_BYTES["int32"])]
            self._device.download(words, normed.reshape(-1))
            self._device.synchronize()
        states = torch.from_numpy(words).view(normed.dtype)[: normed.numel()].view(normed.shape)
        result: FloatArray = states[torch.from_numpy(batch.logit_rows).long()].float().numpy()
        return result

    def _run(self, batch: StepBatch, tokens: int) -> CudaOperators:
        """Enqueue the forward."""
        operators = CudaOperators(self._plan, self._buffers, self._kernels, tokens, every_row=True)
        self._staging.write(batch, tokens)
        self._device.upload(self._buffers["step"], self._staging.words)
        operators.restart()
        self._decoder.forward(operators)
        return operators
