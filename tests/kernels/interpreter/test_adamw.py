from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import IMPLS
from trimegatron.kernels import functional
from trimegatron.kernels.functional import AdamWRuns, Run

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def scalars(step: int, **changed: float) -> Tensor:
    return torch.tensor(functional.adamw_scalars(step=step, **(SETTINGS | changed)), dtype=torch.float32)


CUTS = {
    "whole": [Run(0, 0, 3072, True)],
    "slices": [Run(64, 0, 1088, True), Run(1152, 1088, 64, False), Run(2048, 1152, 1024, False)],
    "out of order": [Run(1920, 64, 192, False), Run(0, 256, 1024, True)],
}
"""Runs in a buffer of 3072 elements whose shard has 3072, 2176 and 1280."""


def where(runs: list[Run], layout: str) -> Tensor:
    """The elements of the runs, in their order."""
    return torch.cat([torch.arange(getattr(run, layout), getattr(run, layout) + run.length) for run in runs])


def torch_adamw(param: Tensor, runs: list[Run]) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """torch's own, in fp64, each run a parameter of its own; ``param`` holds one after the other."""
    parts = [torch.nn.Parameter(p) for p in param.double().split([run.length for run in runs])]
    groups = [{"params": [p], "weight_decay": 0.1 * run.decays} for p, run in zip(parts, runs, strict=True)]
    return parts, torch.optim.AdamW(groups, lr=SETTINGS["lr"], betas=(0.9, 0.999), eps=SETTINGS["eps"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("grad_dtype", "has_low"), [(torch.float32, False), (torch.bfloat16, True), (torch.float16, True)]
)
def test_ten_steps(guards: Guards, impl: str, cut: str, grad_dtype: torch.dtype, has_low: bool) -> None:
    """The fifth step is skipped: its gradient was infinite. Gradients come multiplied by 8. What is in no run stays."""
    n, runs = 3072, CUTS[cut]
    in_flat, in_state = where(runs, "flat"), where(runs, "state")
    in_master = in_state if has_low else in_flat
    size = int(in_state.max()) + 1
    param = guards.put(torch.randn(size if has_low else n))
    exp_avg, exp_avg_sq = guards.put(torch.zeros(size)), guards.put(torch.zeros(size))
    low = guards.put(torch.full((n,), 3.0).bfloat16()) if has_low else None
    outside = torch.ones(param.shape, dtype=torch.bool).index_fill_(0, in_master, False)
    untouched = param[outside].clone()
    parts, optimizer = torch_adamw(param[in_master], runs)
    table = AdamWRuns(runs)
    step = 0
    for call in range(11):
        grad = guards.put((torch.randn(n) * 8).to(grad_dtype))
        overflow = call == 4
        tensors = [t for t in (grad, param, exp_avg, exp_avg_sq, low) if t is not None]
        kept = [t.clone() for t in tensors]
        step += not overflow
        values = scalars(max(1, step), grad_multiplier=1 / 8, found_inf=float(overflow))
        functional.adamw_step_(
            param, exp_avg, exp_avg_sq, grad, values, runs=table, low_precision=low, impl=impl
        )  # fmt: skip
        assert torch.equal(grad, kept[0])
        if overflow:
            assert all(torch.equal(t, k) for t, k in zip(tensors, kept, strict=True))
            continue
        for p, part in zip(parts, grad[in_flat].split([run.length for run in runs]), strict=True):
            p.grad = part.double() / 8
        optimizer.step()
    assert step == 10
    assert torch.equal(param[outside], untouched)
    expected = torch.cat([p.detach() for p in parts])
    # Ten roundings of the master, and 1e-5 of the path of ten steps of 0.01.
    torch.testing.assert_close(param[in_master].double(), expected, rtol=4e-7, atol=1e-6)
    moments = [torch.cat([optimizer.state[p][name] for p in parts]) for name in ("exp_avg", "exp_avg_sq")]
    torch.testing.assert_close(exp_avg[in_state].double(), moments[0], rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq[in_state].double(), moments[1], rtol=2e-5, atol=1e-9)
    if low is not None:
        torch.testing.assert_close(low[in_flat], param[in_state].bfloat16(), rtol=2**-7, atol=0)
        rest = torch.ones(n, dtype=torch.bool).index_fill_(0, in_flat, False)
        assert bool((low[rest] == 3.0).all())


@pytest.mark.parametrize("impl", IMPLS)
def test_epsilon_is_added_after_the_correction(guards: Guards, impl: str) -> None:
    param, grad = torch.ones(64), torch.full((64,), 1e-3)
    moments = torch.zeros(64), torch.zeros(64)
    runs = AdamWRuns([Run(0, 0, 64, True)])
    functional.adamw_step_(param, *moments, grad, scalars(1, eps=1e-3, weight_decay=0.0), runs=runs, impl=impl)
    # m̂ = g and sqrt(v̂) = |g| after one step, so the update is lr g / (g + eps) = lr / 2.
    torch.testing.assert_close(param, torch.full((64,), 1 - 0.005), rtol=2e-7, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_shard(guards: Guards, impl: str) -> None:
    nothing = [torch.zeros(0) for _ in range(4)]
    functional.adamw_step_(*nothing, scalars(1), runs=AdamWRuns([]), impl=impl)
    assert functional.sum_of_squares(nothing[0], impl=impl).item() == 0.0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n", [1, 1000, 4096, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares(guards: Guards, impl: str, n: int, dtype: torch.dtype) -> None:
    grad = guards.put((torch.randn(n) * 3).to(dtype))
    kept = grad.clone()
    total = functional.sum_of_squares(grad, impl=impl)
    assert total.shape == () and total.dtype == torch.float32 and torch.equal(grad, kept)
    torch.testing.assert_close(total.double(), grad.double().square().sum(), rtol=1e-6, atol=0)
    assert torch.equal(total, functional.sum_of_squares(grad, impl=impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_sum_of_squares_shows_overflow(guards: Guards, impl: str, bad: float) -> None:
    grad = torch.zeros(5000)
    grad[4999] = bad
    assert not functional.sum_of_squares(grad, impl=impl).isfinite()
