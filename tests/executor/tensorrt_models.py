"""Small random models with their reference logits, and their executors on the stand-ins for TensorRT and the GPU, or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cuda_models import MODELS as DENSE
from cuda_models import write_model
from executor_runner import Runner, load
from host_device import HostDevice
from packed_models import MODELS as PACKED
from packed_models import write_packed
from tensorrt_stand_in import StandInDevice, StandInRuntime, provide

from edged.checkpoint.folder_record import model_key
from edged.checkpoint.reference_logits import ReferenceLogits
from edged.config import AttentionConfig, ModelConfig
from edged.executor.tensorrt_device import EngineKernels
from edged.executor.tensorrt_executor import TensorRTExecutor

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = {"context_length": 512, "max_sequences": 3, "prefill_chunk": 128}
FEW = AttentionConfig(mode="sparse", dense_below=150, top_k=2, window=64)
MODELS = {
    "dense, tied": {**DENSE["small"], "tie_word_embeddings": True},
    "biased": DENSE["biased"],
    "4-bit": PACKED["gptq, a group a row, biases"],
    "ternary": PACKED["ternary, group 128"],
}


def prompt(count: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, count).tolist()


def references(plan: Any) -> EngineKernels:
    """The kernels' references, on the pointers they are given."""
    host = HostDevice().kernels(plan)
    return EngineKernels(
        attend=lambda args, _: host.attention(args),
        multiply=lambda args, _: host.packed(args),
        argmax=host.argmax,
        sample=host.sample,
    )


def write_folder(folder: Path, name: str) -> Path:
    """One of :data:`MODELS`, with its reference logits."""
    config = MODELS[name]
    if isinstance(config, tuple):
        write_packed(folder, *config)
    else:
        write_model(folder, config)
    write_reference(folder)
    return folder


def write_reference(folder: Path) -> ReferenceLogits:
    """As `edgectl models reference` does; the models have no tokenizer."""
    executor = load(folder, context_length=128, prefill_chunk=128, max_sequences=4)
    # In one piece for the profile of prompts, and a few tokens that are decoded.
    tokens, positions = np.array(prompt(72, 9), np.int32), np.array([59, 63, 66, 71], np.int32)
    runner = Runner(executor)
    batch = runner.batch([(runner.sequence(tokens.tolist()), 72)])
    logits = executor.logits(replace(batch, logit_rows=positions))
    executor.close()
    reference = ReferenceLogits(model_key(folder), tokens, positions, logits, {})
    reference.write(folder)
    return reference


def config_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(
        "m", folder, executor="tensorrt", device="cuda", dtype="float16", **{**SETTINGS, **settings}
    )


def open_executor(folder: Path, place: str = "references", *, refitted: bool = False, **settings: Any) -> Any:
    config = config_of(folder, **settings)
    device: Any = StandInDevice(references)
    runtime: Any = StandInRuntime(config)
    if place == "kernels":
        from tensorrt_on_torch import TorchRuntime

        from edged.executor.tensorrt_device import PyCudaDevice

        torch.zeros(1, device="cuda")
        device, runtime = PyCudaDevice(), TorchRuntime(config)
    executor = TensorRTExecutor(
        config,
        provide=partial(provide, refitted=refitted),
        open_device=lambda: device,
        open_runtime=lambda _: runtime,
    )
    executor.load(lambda *_: None)
    return executor, device, runtime
