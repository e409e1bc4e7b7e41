"""Compares an op with its formula in fp64: the result, every gradient, and that nothing else was touched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.kernels.guards import Guards
from trimegatron.bench.closeness import TOLERANCE, close

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IMPLS = ["triton", "reference"]


def compare(
    guards: Guards,
    op: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: list[Tensor | None],
    *,
    upstream: Tensor | None = None,
    tolerance: float | None = None,
    sum_tolerance: float | None = None,
) -> None:
    """``op`` and ``formula`` take ``inputs``; all that are floating point get gradients, for ``upstream`` (random
    without it). Gradients of fewer dimensions than the first input are sums over its rows; they are held to
    ``sum_tolerance``."""
    first = next(x for x in inputs if x is not None)
    tolerance = tolerance or TOLERANCE[first.dtype]
    placed = [
        guards.put(x).requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs
    ]  # fmt: skip
    kept = [None if x is None else x.detach().clone() for x in inputs]
    exact = [
        x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs
    ]  # fmt: skip

    y, expected = op(*placed), formula(*exact)
    dy = torch.randn(y.shape).to(y.dtype) if upstream is None else upstream
    dy_kept = dy.clone()
    y.backward(dy)
    expected.backward(dy.double())

    close(y.detach(), expected.detach(), tolerance, "result")
    for index, (actual, want) in enumerate(zip(placed, exact, strict=True)):
        if actual is None or want is None or want.grad is None:
            continue
        assert actual.grad is not None and actual.grad.dtype == actual.dtype
        limit = tolerance if want.dim() == first.dim() else sum_tolerance or 4 * tolerance
        close(actual.grad, want.grad, limit, f"gradient of input {index}")
    for actual, before in zip(placed, kept, strict=True):
        if actual is not None and before is not None:
            assert torch.equal(actual.detach(), before), "an input was written into"
    assert torch.equal(dy, dy_kept), "the incoming gradient was written into"


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values of a matrix-like tensor in layouts autograd may hand over."""
    wide = torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)
    return {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "strided": wide.flatten(-2)[..., ::2],
        "offset": torch.cat([x.new_full((1,), float("nan")), x.reshape(-1)])[1:].view(x.shape),
    }
