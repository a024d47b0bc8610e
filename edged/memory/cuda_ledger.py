"""What CUDA takes beside the executor's buffers; measured, because no document says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edged.memory.cuda_buffers import draft_layers, graphs
from edged.memory.specs import TENSORRT

if TYPE_CHECKING:
    from edged.memory.buffers import ModelPlan

MIB = 2**20

CUDA_CONTEXT = 752 * MIB
"""Device memory of a process beside what its models hold: the context (526 MiB on an H200), kernels of torch, cuBLAS and
ours. With workspaces and the graphs of an 8B model 771 MiB were measured in bf16, and 811 in 4 bits, whose kernels have
become more since."""

WORKSPACES = 64 * MIB
"""What cuBLAS keeps for the stream of each model."""

CUDA_RUNTIME = 1536 * MIB
"""Host memory of an engine process on a GPU: the interpreter, torch, the CUDA libraries and what the driver maps (1.1 to
1.2 GiB of proportional set size on an H200's host with torch 2.11)."""

_NODES_PER_LAYER = 14
_DRAFT_NODES = 20
"""Of a draft's layer with its logits and the growth of a level."""
_NODE_BYTES = 8192
"""Device memory of a captured launch."""


def graph_bytes(plan: ModelPlan) -> int:
    """Device memory of all captured graphs, and of cuBLAS in torch's."""
    nodes = _NODES_PER_LAYER * plan.architecture.layers + 16
    launches = graphs(plan) * nodes + draft_layers(plan) * _DRAFT_NODES
    return (0 if plan.executor == TENSORRT else WORKSPACES) + launches * _NODE_BYTES
