"""Times on a GPU: with the L2 cache written over before each run, and inputs that rotate through a gigabyte."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench.case import Case

WORKING_SET = 1 << 30  # bytes
_FLUSH = 256 << 20
_REPEATS = 5


def flush_buffer(device: torch.device) -> Tensor:
    """What is written over to empty the L2 cache."""
    return torch.empty(_FLUSH, dtype=torch.uint8, device=device)


def input_sets(case: Case) -> list[list[Tensor]]:
    """So many inputs of a case that they fill the working set together."""
    first = case.inputs()
    size = sum(x.numel() * x.element_size() for x in first)
    count = max(1, min(64, -(-WORKING_SET // max(1, size))))
    return [first, *(case.inputs() for _ in range(count - 1))]


def _seconds(run: Callable[[], Any], flush: Tensor) -> list[float]:
    """Of a few runs, each after the L2 cache has been written over."""
    times = []
    for _ in range(_REPEATS):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def time_calls(made: list[Callable[[], Any]], flush: Tensor, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Seconds of a call, and of its kernels alone: one graph of all the calls, or why there is none. Medians;
    ``runs_s`` holds every run of the graph, or of the calls without one. ``stream`` is the current one, and the one on
    which the forward passes ran, since backward passes go back to it."""

    def all_calls() -> None:
        for call in made:
            call()

    all_calls()  # warm
    torch.cuda.synchronize()
    runs = [seconds / len(made) for seconds in _seconds(all_calls, flush)]
    result: dict[str, Any] = {"call_s": statistics.median(runs)}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            all_calls()
        runs = [seconds / len(made) for seconds in _seconds(graph.replay, flush)]
        result["kernel_s"] = statistics.median(runs)
    except RuntimeError as error:
        result["no_graph"] = str(error).splitlines()[0]
    return result | {"runs_s": runs}


def copy_rate(device: torch.device, flush: Tensor) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(WORKING_SET // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(_seconds(lambda: target.copy_(source), flush))
