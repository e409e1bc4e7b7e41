"""Every kernel on a device: its result held against the eager reference, then its time beside what PyTorch offers.

Two times each: of the kernels alone, as one CUDA graph of twenty launches, and of the calls that launch them. Inputs
rotate through a gigabyte, so that nothing is found in the L2 cache.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench.case import Case, incoming
from trimegatron.bench.clock import repeat
from trimegatron.bench.closeness import TOLERANCE, close
from trimegatron.bench.results import OURS, Result, measured

WORKING_SET = 1 << 30  # bytes
LAUNCHES = 20


def check(case: Case) -> None:
    """Raises AssertionError where the kernel's result is not the reference's. Sums over rows get more room."""
    torch.manual_seed(1)
    inputs = case.inputs()
    if case.in_place:
        ours, exact = ([x.clone() for x in inputs] for _ in range(2))
        case.kernel(*ours)
        case.exact(*exact)
        pairs = list(zip(ours[: case.in_place], exact[: case.in_place], strict=True))
    else:
        pairs = list(zip(_tensors(case.kernel(*inputs)), _tensors(case.exact(*inputs)), strict=True))
    rows = pairs[0][0].dim()
    for index, (actual, expected) in enumerate(pairs):
        room = 1 if actual.dim() == rows and not case.in_place else 8
        close(actual, expected, room * max(TOLERANCE[actual.dtype], 1e-5), f"{case.name} {case.shape} [{index}]")


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def rivals(case: Case) -> dict[str, Callable[..., Any]]:
    """Name -> the forward computation."""
    if case.rival is None:
        return {}
    torch.compiler.reset()  # else many shapes of one function end in its fallback
    found = {"eager": case.rival, "compile": torch.compile(case.rival, dynamic=False)}
    if importlib.util.find_spec("liger_kernel") and case.name.startswith("layer_norm"):
        norm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        found["liger"] = lambda x, w, b, *_: norm.apply(x, w, b, 1e-5)
    return found


def calls(case: Case, function: Callable[..., Any], sets: list[list[Tensor]]) -> list[Callable[[], Any]]:
    """One call for each set of inputs: the forward computation, or the backward pass of one that has run."""
    if not case.leaves:
        return [partial(function, *inputs) for inputs in sets]
    made: list[Callable[[], Any]] = []
    for inputs in sets:
        taken = [x.detach().requires_grad_() for x in inputs[: case.leaves]]
        y = function(*taken, *inputs[case.leaves :])
        gradients = incoming(y, inputs)
        made.append(partial(torch.autograd.grad, y, taken, gradients, retain_graph=True))
    return made


def time_calls(made: list[Callable[[], Any]], flush: Tensor, stream: torch.cuda.Stream) -> dict[str, list[float]]:
    """Seconds of a call, and of its kernels alone unless they cannot be captured: one graph of ``LAUNCHES`` calls.
    ``stream`` is the current one, and the one on which the forward passes ran, since backward passes go back to it."""

    def all_calls() -> None:
        for call in islice(cycle(made), LAUNCHES):
            call()

    found = {"call time": repeat(all_calls, flush)}
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            all_calls()
        found["time"] = repeat(graph.replay, flush)
    except RuntimeError as error:
        print(f"  no graph of these calls, so no time of the kernels alone: {str(error).splitlines()[0]}")
    return {figure: [seconds / LAUNCHES for seconds in times] for figure, times in found.items()}


def time_case(case: Case, bandwidth: float, flush: Tensor) -> Iterator[Result]:
    """Ours and the rivals' times. The least there can be: the case's bytes at ``bandwidth`` (bytes a second)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = case.inputs()
        size = sum(x.numel() * x.element_size() for x in first)
        count = max(1, min(LAUNCHES, -(-WORKING_SET // max(1, size))))
        sets = [first, *(case.inputs() for _ in range(count - 1))]
        contenders: dict[str, Callable[[], list[Callable[[], Any]]]]
        contenders = {OURS: lambda: [partial(case.kernel, *inputs) for inputs in sets]}
        contenders |= {name: partial(calls, case, function, sets) for name, function in rivals(case).items()}
        for name, make in contenders.items():
            for figure, times in time_calls(make(), flush, stream).items():
                yield measured(
                    case.name, name, figure, "s", times, floor=case.floor / bandwidth, shape=case.shape,
                    least_bytes=case.floor, buffers=count,
                )  # fmt: skip


def line(case: Case, results: list[Result]) -> str:
    """Of a case that was timed."""
    medians = {(result.variant, result.figure): result for result in results}
    parts = []
    for name in dict.fromkeys(result.variant for result in results):
        call, kernel = medians[name, "call time"], medians.get((name, "time"))
        alone = f"{1e6 * kernel.median:.1f}" if kernel else "no graph"
        best = kernel or call
        assert best.floor is not None
        parts.append(f"{name} {alone} ({1e6 * call.median:.1f}) {best.floor / best.median:.0%}")
    return f"{case.name:<28}{case.shape:>26}  " + "; ".join(parts)
