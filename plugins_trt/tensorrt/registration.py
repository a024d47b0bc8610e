"""Registers the creator of every operator with TensorRT's plugin registry, once a process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins_trt.tensorrt.adapter import TensorRT, TensorRTError
from plugins_trt.tensorrt.attention_plugin import AttentionOperator
from plugins_trt.tensorrt.base import make_creator, make_plugin_class
from plugins_trt.tensorrt.linear_plugins import TernaryLinearOperator, W4A16LinearOperator
from plugins_trt.tensorrt.names import NAMESPACE
from plugins_trt.tensorrt.pin import pin
from plugins_trt.tensorrt.tree_plugin import VerifyTreeOperator

if TYPE_CHECKING:
    from plugins_trt.tensorrt.operator import PluginOperator

OPERATORS: tuple[type[PluginOperator], ...] = (
    AttentionOperator,
    W4A16LinearOperator,
    TernaryLinearOperator,
    VerifyTreeOperator,
)
"""Every operator of ours."""

_registered: set[str] = set()
"""Names of the bindings that know the operators."""


def register(tensorrt: TensorRT) -> None:
    """Make the operators known to the parser and the runtime of these bindings.

    Raises:
        TensorRTError: TensorRT refuses a creator.
    """
    if tensorrt.name in _registered:
        return
    trt = tensorrt.module
    plugin_class = make_plugin_class(trt)
    creators = [make_creator(trt, plugin_class, operator) for operator in OPERATORS]
    registry = trt.get_plugin_registry()
    for creator in creators:
        pin(creator)
        if not registry.register_creator(creator, NAMESPACE):
            raise TensorRTError(
                f"{tensorrt.name} {tensorrt.version} refuses the plugin {NAMESPACE}::{creator.name} version "
                f"{creator.plugin_version}; is one of that name registered already?"
            )
    _registered.add(tensorrt.name)
