"""The GPU of this process: one context that torch and PyCUDA share, one stream, pinned memory, captured graphs."""

from __future__ import annotations

import atexit
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from edged.errors import UnsupportedError
from edged.executor.cuda_draft_kernels import load_draft_kernels
from edged.memory.cuda_buffers import tree_sizes
from plugins_trt.argmax.launch import Argmaxer
from plugins_trt.attention.launch import Attender
from plugins_trt.commit.launch import Committer
from plugins_trt.embedding.launch import Embedder
from plugins_trt.registry import Kernels, KernelsError
from plugins_trt.rms_norm.launch import RmsNormalizer
from plugins_trt.sample.launch import Sampler
from plugins_trt.silu_mul.launch import SiluMultiplier
from plugins_trt.skinny_linear.launch import SkinnyLinearMultiplier
from plugins_trt.ternary_linear.launch import TernaryMultiplier, TernaryWidener
from plugins_trt.verify_tree.launch import TreeVerifier
from plugins_trt.w4a16_linear.launch import W4A16Multiplier
from plugins_trt.w4a16_widen.launch import W4A16Widener

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np
    import numpy.typing as npt

    from edged.executor.cuda_draft_kernels import DraftKernels
    from edged.memory.buffers import ModelPlan
    from plugins_trt.argmax.contract import Argmax
    from plugins_trt.attention.contract import Attention
    from plugins_trt.commit.contract import Commit
    from plugins_trt.embedding.contract import Embedding
    from plugins_trt.rms_norm.contract import RmsNorm
    from plugins_trt.sample.contract import Sample
    from plugins_trt.silu_mul.contract import SiluMul
    from plugins_trt.skinny_linear.contract import SkinnyGated, SkinnyLinear
    from plugins_trt.ternary_linear.contract import TernaryLinear, TernaryWiden
    from plugins_trt.verify_tree.contract import VerifyTree
    from plugins_trt.w4a16_linear.contract import W4A16Linear
    from plugins_trt.w4a16_widen.contract import W4A16Widen

    Words = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepKernels:
    """The operators of one model; a call enqueues one on the device's stream."""

    embedding: Callable[[Embedding], None]
    rms_norm: Callable[[RmsNorm], None]
    silu_mul: Callable[[SiluMul], None]
    attention: Callable[[Attention], None]
    argmax: Callable[[Argmax], None]
    linear: Callable[[SkinnyLinear], None]
    gated: Callable[[SkinnyGated], None]
    sample: Callable[[Sample], None]
    packed: Callable[[W4A16Linear | TernaryLinear], None]
    """Of a model's packed weights, which are of one kind; and so is what follows."""
    widen: Callable[[W4A16Widen | TernaryWiden], None]
    verify: Callable[[VerifyTree], None]
    commit: Callable[[Commit], None]


class Device(Protocol):
    """What the executor asks of the device it runs on."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors live."""

    @property
    def multiprocessors(self) -> int:
        """How many it has."""

    def scope(self) -> AbstractContextManager[Any]:
        """Inside, torch's work goes to the device's stream."""

    def host_words(self, count: int) -> Words:
        """Host memory that copies to the device read directly."""

    def upload(self, target: torch.Tensor, source: Words) -> None:
        """Enqueue a copy from :meth:`host_words`."""

    def download(self, target: Words, source: torch.Tensor) -> None:
        """Enqueue a copy to :meth:`host_words`."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work`` once and give back what enqueues it again."""

    def mark(self) -> Callable[[], None]:
        """What waits for everything that has been enqueued by now."""

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""

    def kernels(self, plan: ModelPlan) -> StepKernels:
        """The operators for a model's dtype and heads."""

    def draft_kernels(self, plan: ModelPlan) -> DraftKernels:
        """The operators of a model's draft."""

    def close(self) -> None:
        """Give back what is not the buffers'."""


class CudaDevice:
    """The first GPU.

    Raises:
        UnsupportedError: There is no GPU, torch was built without CUDA, or PyCUDA is missing; says which.
    """

    def __init__(self) -> None:
        try:
            driver: Any = importlib.import_module("pycuda.driver")
        except ImportError as error:
            raise UnsupportedError(
                f"device: cuda needs PyCUDA, which does not load here ({error}): pip install edged[gpu]",
                field="device",
            ) from None
        if not torch.cuda.is_available():
            why = "finds no GPU" if torch.version.cuda else "was built without CUDA"
            raise UnsupportedError(
                f"device: cuda, but torch {torch.__version__} {why}: install a driver and a torch for CUDA, "
                "or set device to cpu",
                field="device",
            )
        torch.zeros(1, device="cuda")  # makes the primary context, which PyCUDA then shares
        self._driver = driver
        driver.init()
        self._context = driver.Device(torch.cuda.current_device()).retain_primary_context()
        self._context.push()
        # PyCUDA ends a process that leaves its context behind.
        atexit.register(self._leave)
        self._stream = driver.Stream()
        self._torch_stream = torch.cuda.ExternalStream(self._stream.handle)
        self._mark = driver.Event(driver.event_flags.DISABLE_TIMING)
        self._kernels = Kernels.of_current_device()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def torch_device(self) -> torch.device:
        """``cuda``."""
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def multiprocessors(self) -> int:
        """132 on an H200."""
        return self._kernels.multiprocessors

    @property
    def torch_stream(self) -> torch.cuda.Stream:
        """The stream of all work, for events."""
        return self._torch_stream

    def scope(self) -> AbstractContextManager[Any]:
        """Inside, torch's work goes to the stream that PyCUDA made."""
        return torch.cuda.stream(self._torch_stream)

    def host_words(self, count: int) -> Words:
        """Page-locked memory, zeros."""
        words: Words = self._driver.pagelocked_zeros(count, "int32")
        return words

    def upload(self, target: torch.Tensor, source: Words) -> None:
        """Enqueue a copy; captured, it reads what is there when the graph runs."""
        self._driver.memcpy_htod_async(target.data_ptr(), source, self._stream)

    def download(self, target: Words, source: torch.Tensor) -> None:
        """Enqueue a copy; after :meth:`synchronize` it is there."""
        self._driver.memcpy_dtoh_async(target, source.data_ptr(), self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph; ``work`` runs once before, so that whatever it loads or allocates is there."""
        with self.scope():
            work()
            self.synchronize()
            graph = torch.cuda.CUDAGraph()
            # What is allocated while capturing is used by one graph at a time, so they share it.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._graphs.append(graph)

        def replay() -> None:
            with self.scope():
                graph.replay()

        return replay

    def mark(self) -> Callable[[], None]:
        """An event behind what has been enqueued; calling what is returned waits for it."""
        self._mark.record(self._stream)
        wait: Callable[[], None] = self._mark.synchronize
        return wait

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()

    def kernels(self, plan: ModelPlan) -> StepKernels:
        """Load them.

        Raises:
            UnsupportedError: No compiled kernels suit the device.
        """
        a, find, stream = plan.architecture, self._kernels.operator, self._stream
        try:
            embed = Embedder(find("embedding"), dtype=plan.dtype)
            norm = RmsNormalizer(find("rms_norm"), dtype=plan.dtype)
            multiply = SiluMultiplier(find("silu_mul"), dtype=plan.dtype)
            best = Argmaxer(find("argmax"), dtype="float32")
            draw = Sampler(
                find("sample"), multiprocessors=self.multiprocessors, capability=self._kernels.capability
            )
            skinny = SkinnyLinearMultiplier(
                find("skinny_linear"),
                multiprocessors=self.multiprocessors,
                shared_bytes=self._kernels.shared_bytes,
                dtype=plan.dtype,
            )
            attend = Attender(
                self._kernels,
                dtype=plan.dtype,
                heads=a.heads,
                kv_heads=a.kv_heads,
                head_dim=a.head_dim,
                kv_dtype=plan.quantized_kv,
            )
            packed, widen = self._packed_kernels(plan)
            verify, keep = self._tree_kernels(plan)
        except KernelsError as error:
            raise UnsupportedError(f"device: cuda: {error}", field="device") from error
        return StepKernels(
            embedding=lambda args: embed(args, stream),
            rms_norm=lambda args: norm(args, stream),
            silu_mul=lambda args: multiply(args, stream),
            attention=lambda args: attend(args, stream),
            argmax=lambda args: best(args, stream),
            linear=lambda args: skinny(args, stream),
            gated=lambda args: skinny.gated(args, stream),
            sample=lambda args: draw(args, stream),
            packed=lambda args: packed(args, stream),
            widen=lambda args: widen(args, stream),
            verify=lambda args: verify(args, stream),
            commit=lambda args: keep(args, stream),
        )

    def draft_kernels(self, plan: ModelPlan) -> DraftKernels:
        """Load those of a draft.

        Raises:
            UnsupportedError: No compiled kernels suit the device.
        """
        try:
            return load_draft_kernels(self._kernels, plan, self._stream)
        except KernelsError as error:
            raise UnsupportedError(f"device: cuda: {error}", field="device") from error

    def _packed_kernels(self, plan: ModelPlan) -> tuple[Any, Any]:
        """Those of packed weights: a model without any loads none."""
        quantization = plan.architecture.quantization
        if quantization is None:
            return _absent, _absent
        find = self._kernels.operator
        if quantization.ternary:
            found = find("ternary_linear")
            return (
                TernaryMultiplier(found, multiprocessors=self.multiprocessors, dtype=plan.dtype),
                TernaryWidener(found, dtype=plan.dtype),
            )
        multiply = W4A16Multiplier(
            find("w4a16_linear"),
            multiprocessors=self.multiprocessors,
            shared_bytes=self._kernels.shared_bytes,
            dtype=plan.dtype,
        )
        return multiply, W4A16Widener(find("w4a16_widen"), dtype=plan.dtype)

    def _tree_kernels(self, plan: ModelPlan) -> tuple[Any, Any]:
        """Those that verify trees and keep their paths: a model without any loads none."""
        if not tree_sizes(plan):
            return _absent, _absent
        keep = Committer(
            self._kernels.operator("commit"),
            dtype=plan.dtype,
            head_dim=plan.architecture.head_dim,
            kv_dtype=plan.quantized_kv,
        )
        return TreeVerifier(self._kernels.operator("verify_tree")), keep

    def close(self) -> None:
        """Drop the graphs and leave the context."""
        self.synchronize()
        for graph in self._graphs:
            graph.reset()
        self._graphs = []
        # torch keeps a workspace of cuBLAS for each stream that ever multiplied, some 64 MiB.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - torch's own graphs call it, too
        if clear is not None:
            clear()
        torch.cuda.empty_cache()
        atexit.unregister(self._leave)
        self._leave()

    def _leave(self) -> None:
        self._context.pop()


def _absent(*_: object) -> None:
    raise AssertionError("a model without packed weights has no such product, one without drafts no trees")
