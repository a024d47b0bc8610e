"""The GPU that a script measures on: a stream that PyCUDA and torch share, our kernels, times of graphs, and the ceilings."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from _report import environment

from plugins_trt.registry import Kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pycuda.driver import Stream


@dataclass(frozen=True)
class Gpu:
    """The first GPU."""

    kernels: Kernels
    stream: Stream
    """PyCUDA's."""
    torch_stream: torch.cuda.Stream
    """The same one."""


@contextmanager
def opened_gpu() -> Iterator[Gpu]:
    """The GPU, with torch's context as the current one of PyCUDA until the end."""
    from pycuda import driver

    torch.zeros(1, device="cuda")
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    try:
        stream = driver.Stream()
        yield Gpu(Kernels.of_current_device(), stream, torch.cuda.ExternalStream(stream.handle))
    finally:
        context.pop()


def gpu_environment(**more: object) -> dict[str, object]:
    """What :func:`_report.environment` says, and the GPU."""
    return environment(device=torch.cuda.get_device_name(), cuda=torch.version.cuda, **more)


def event_ms(stream: torch.cuda.Stream, run: Callable[[], object], times: int) -> float:
    """Median time between events around each run, in milliseconds, after three that do not count."""
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        for begin, end in events:
            begin.record(stream)
            run()
            end.record(stream)
        stream.synchronize()
    return float(sorted(begin.elapsed_time(end) for begin, end in events)[times // 2])


def graph_ms(stream: torch.cuda.Stream, run: Callable[[], object], times: int = 20) -> float:
    """Median time of a graph of `run`, in milliseconds."""
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return event_ms(stream, graph.replay, times)


def ceilings(stream: torch.cuda.Stream) -> dict[str, float]:
    """Copy bandwidth (bytes read and written) and the rate of a bf16 matrix product, on random data."""
    source = torch.randn(1 << 30, device="cuda")  # 4 GiB
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / event_ms(stream, lambda: target.copy_(source), 11) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    rate = 2 * 8192**3 / event_ms(stream, lambda: a @ b, 11) * 1e3
    return {"copy_bytes_per_s": copy, "bf16_flop_per_s": rate}
