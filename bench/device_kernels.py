"""Every kernel's time on a device beside what PyTorch offers.

Two times each: of the kernels alone, as one CUDA graph of twenty launches, and of the calls that launch them. Inputs
rotate through a gigabyte, so that nothing is found in the L2 cache.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench.case import Case, incoming
from trimegatron.bench.device_timing import input_sets, time_calls
from trimegatron.bench.results import OURS, Result, measured


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


def time_case(case: Case, bandwidth: float, flush: Tensor) -> Iterator[Result]:
    """Ours and the rivals' times. The least there can be: the case's bytes at ``bandwidth`` (bytes a second)."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sets = input_sets(case)
        contenders: dict[str, Callable[[], list[Callable[[], Any]]]]
        contenders = {OURS: lambda: [partial(case.kernel, *inputs) for inputs in sets]}
        contenders |= {name: partial(calls, case, function, sets) for name, function in rivals(case).items()}
        for name, make in contenders.items():
            times = time_calls(make(), flush, stream)
            figures = {"call time": times["call_s"]} | ({"time": times["kernel_s"]} if "kernel_s" in times else {})
            for figure, seconds in figures.items():
                yield measured(
                    case.name, name, figure, "s", seconds, floor=case.floor / bandwidth, shape=case.shape,
                    least_bytes=case.floor, buffers=len(sets), note=times.get("no_graph", ""),
                )  # fmt: skip


def line(case: Case, results: list[Result]) -> str:
    """Of a case that was timed."""
    medians = {(result.variant, result.figure): result for result in results}
    parts = []
    for name in dict.fromkeys(result.variant for result in results):
        call, kernel = medians[name, "call time"], medians.get((name, "time"))
        alone = f"{1e6 * kernel.median:.1f}" if kernel else f"no graph: {call.note}"
        best = kernel or call
        assert best.floor is not None
        parts.append(f"{name} {alone} ({1e6 * call.median:.1f}) {best.floor / best.median:.0%}")
    return f"{case.name:<28}{case.shape:>26}  " + "; ".join(parts)
