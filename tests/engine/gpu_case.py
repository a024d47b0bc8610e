"""What tests of nodes on a GPU share: TensorRT's registry with our creators, and PyCUDA beside torch.

The bindings are the first of `BINDINGS` that is installed. `pip install tensorrt-lean-cu13-libs
tensorrt-lean-cu13-bindings` (44 MB) is the smallest that brings the registry and the base classes.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest

from plugins_trt.tensorrt.base import make_creator, make_plugin_class
from plugins_trt.tensorrt.names import NAMESPACE
from plugins_trt.tensorrt.pin import pin
from plugins_trt.tensorrt.registration import OPERATORS

BINDINGS = ("tensorrt", "tensorrt_lean", "tensorrt_lean_bindings", "tensorrt_rtx")


@dataclass
class Gpu:
    torch: Any
    stream: Any
    kernels: Any


@functools.cache
def bindings() -> Any:
    """The bindings, which know our creators; skips where none are installed."""
    found = [name for name in BINDINGS if importlib.util.find_spec(name) is not None]
    if not found:
        pytest.skip(f"no TensorRT is installed (looked for {', '.join(BINDINGS)})")
    if found[0] == "tensorrt_rtx":
        from plugins_trt.tensorrt import adapter

        module = adapter.load(found[0]).module
    else:
        module = importlib.import_module(found[0])
    plugin_class = make_plugin_class(module)
    for operator in OPERATORS:
        creator = make_creator(module, plugin_class, operator)
        pin(creator)
        assert module.get_plugin_registry().register_creator(creator, NAMESPACE)
    return module


@functools.cache
def first_gpu() -> Gpu:
    """Torch, a PyCUDA stream that torch uses too, and the kernels."""
    import torch
    from pycuda import driver

    from plugins_trt.registry import Kernels

    torch.zeros(1, device="cuda")
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    atexit.register(context.pop)
    stream = driver.Stream()
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream.handle))
    return Gpu(torch, stream, Kernels.of_current_device())


def descriptions(trt: Any, tensors: list[Any]) -> list[Any]:
    """What TensorRT says of tensors."""
    names = {
        "torch.bfloat16": trt.DataType.BF16,
        "torch.float16": trt.DataType.HALF,
        "torch.int32": trt.DataType.INT32,
        "torch.float32": trt.DataType.FLOAT,
    }
    result = []
    for tensor in tensors:
        each = trt.PluginTensorDesc()
        each.dims, each.type = list(tensor.shape), names[str(tensor.dtype)]
        result.append(each)
    return result


def created(trt: Any, operator: Any, node: str) -> Any:
    """The node that the registry's creator makes of an operator's serialized fields, attached to a context."""
    creator = trt.get_plugin_registry().get_creator(operator.NAME, operator.VERSION, NAMESPACE)
    written = make_plugin_class(trt)(operator, node).get_fields_to_serialize()
    made = creator.create_plugin(node, written, trt.TensorRTPhase.RUNTIME)
    assert isinstance(made, trt.IPluginV3OneRuntime)
    return made.attach_to_context(None)
