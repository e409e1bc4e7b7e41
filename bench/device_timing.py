"""Times on a GPU: with the L2 cache written over before each run, and inputs that rotate through a gigabyte."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench.case import Case
from trimegatron.bench.clock import repeat

WORKING_SET = 1 << 30  # bytes
LAUNCHES = 20
"""Calls in a run and in a graph."""
_FLUSH = 256 << 20


def flush_buffer(device: torch.device) -> Tensor:
    """What is written over to empty the L2 cache; next to nothing on a CPU, whose times nobody uses."""
    return torch.empty(_FLUSH if device.type == "cuda" else 16, dtype=torch.uint8, device=device)


def input_sets(case: Case) -> list[list[Tensor]]:
    """So many inputs of a case that they fill the working set together, or that each of ``LAUNCHES`` has its own."""
    first = case.inputs()
    size = sum(x.numel() * x.element_size() for x in first)
    count = max(1, min(LAUNCHES, -(-WORKING_SET // max(1, size))))
    return [first, *(case.inputs() for _ in range(count - 1))]


def time_calls(made: list[Callable[[], Any]], flush: Tensor, stream: torch.cuda.Stream) -> dict[str, Any]:
    """Seconds of a call in ``LAUNCHES`` that go through ``made`` in turn, one value for each repeat.

    ``call_s`` is of the calls as they are made, ``kernel_s`` of the kernels alone, by a CUDA graph of the same calls;
    where they cannot be captured ``no_graph`` says why. ``runs_s`` is the second if there is one, else the first.
    ``stream`` is the current one, and the one on which the forward passes ran, since backward passes go back to it.
    """

    def all_calls() -> None:
        for call in islice(cycle(made), LAUNCHES):
            call()

    def seconds(run: Callable[[], object]) -> list[float]:
        return [total / LAUNCHES for total in repeat(run, flush)]

    found: dict[str, Any] = {"call_s": seconds(all_calls)}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            all_calls()
        found["kernel_s"] = seconds(graph.replay)
    except RuntimeError as error:
        found["no_graph"] = str(error).splitlines()[0]
    return found | {"runs_s": found.get("kernel_s", found["call_s"])}


def copy_rates(device: torch.device, flush: Tensor, num_bytes: int = WORKING_SET) -> list[float]:
    """Bytes a second that a copy of ``num_bytes`` reads and writes, for each repeat."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return [2 * num_bytes / seconds for seconds in repeat(lambda: target.copy_(source), flush)]


def copy_rate(device: torch.device, flush: Tensor) -> float:
    """The median."""
    return statistics.median(copy_rates(device, flush))
