"""The operators of a model with the launches of one kind left out: what a step is faster by is what they take of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plugins_trt.attention.launch import Attender

if TYPE_CHECKING:
    from collections.abc import Callable

    from _random_model import RandomModel

    from edged.executor.cuda_device import StepKernels


def nothing(*_: object) -> None:
    """Launches nothing."""


def without_one_kind(model: RandomModel) -> dict[str, StepKernels]:
    """The operators as they are (`whole`), and without one kind each, by its name."""
    kernels = model._kernels  # noqa: SLF001 - what a step runs
    a, gpu = model.plan.architecture, model.gpu

    def attender(*without: str) -> StepKernels:
        attend = Attender(
            gpu._kernels,  # noqa: SLF001
            dtype=model.plan.dtype,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
        )
        for name in without:
            setattr(attend, name, nothing)
        stream = gpu._stream  # noqa: SLF001
        return replace(kernels, attention=lambda args: attend(args, stream))

    def of_linear(kind: str) -> StepKernels:
        """Without one kind of linear."""
        pointers = {each.weight.data_ptr() for each in model.linears[kind]}

        def unless(launch: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(args: Any) -> None:  # noqa: ANN401 - of several contracts
                found = args.tiles if hasattr(args, "tiles") else args.weight
                if found.pointer not in pointers:
                    launch(args)

            return call

        return replace(
            kernels,
            packed=unless(kernels.packed),
            linear=unless(kernels.linear),
            gated=unless(kernels.gated),
        )

    return {
        "whole": kernels,
        "rms_norm": replace(kernels, rms_norm=nothing),
        "append": attender("_append"),
        "selection": attender("_select"),
        "attend": attender("_attend"),
        "attention": replace(kernels, attention=nothing),
        "argmax": replace(kernels, argmax=nothing),
        **{kind: of_linear(kind) for kind in model.linears},
    }


def without_any(model: RandomModel) -> StepKernels:
    """Operators that launch nothing."""
    return replace(
        model._kernels,  # noqa: SLF001
        rms_norm=nothing,
        attention=nothing,
        argmax=nothing,
        packed=nothing,
        linear=nothing,
        gated=nothing,
        embedding=nothing,
    )
