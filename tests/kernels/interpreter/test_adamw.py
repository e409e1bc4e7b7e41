from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import IMPLS
from trimegatron.kernels import functional

SETTINGS = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


def scalars(step: int, **changed: float) -> Tensor:
    return torch.tensor(functional.adamw_scalars(step=step, **(SETTINGS | changed)), dtype=torch.float32)


def torch_adamw(param: Tensor, num_decayed: int) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """torch's own, in fp64, with the decayed elements in a group of their own."""
    parts = [torch.nn.Parameter(p) for p in (param[:num_decayed].double(), param[num_decayed:].double())]
    groups = [{"params": [p], "weight_decay": wd} for p, wd in zip(parts, (0.1, 0.0), strict=True)]
    return parts, torch.optim.AdamW(groups, lr=SETTINGS["lr"], betas=(0.9, 0.999), eps=SETTINGS["eps"])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n,num_decayed", [(3001, 1700), (1024, 1024), (5, 0)])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ten_steps(guards: Guards, impl: str, n: int, num_decayed: int, grad_dtype: torch.dtype) -> None:
    """The fifth step is skipped: its gradient was infinite. Gradients come multiplied by 8."""
    param = guards.put(torch.randn(n))
    exp_avg, exp_avg_sq = guards.put(torch.zeros(n)), guards.put(torch.zeros(n))
    low = guards.put(torch.zeros(n).bfloat16())
    parts, optimizer = torch_adamw(param, num_decayed)
    step = 0
    for call in range(11):
        grad = guards.put((torch.randn(n) * 8).to(grad_dtype))
        kept = [t.clone() for t in (param, exp_avg, exp_avg_sq, low, grad)]
        overflow = call == 4
        step += not overflow
        values = scalars(max(1, step), grad_multiplier=1 / 8, found_inf=float(overflow))
        state = (param, exp_avg, exp_avg_sq, grad)
        functional.adamw_step_(*state, values, num_decayed=num_decayed, low_precision=low, impl=impl)
        assert torch.equal(grad, kept[-1])
        if overflow:
            assert all(torch.equal(t, k) for t, k in zip((param, exp_avg, exp_avg_sq, low), kept, strict=False))
            continue
        for p, part in zip(parts, (grad[:num_decayed], grad[num_decayed:]), strict=True):
            p.grad = part.double() / 8
        optimizer.step()
    assert step == 10
    expected = torch.cat([p.detach() for p in parts])
    # Ten roundings of the master, and 1e-5 of the path of ten steps of 0.01.
    torch.testing.assert_close(param.double(), expected, rtol=4e-7, atol=1e-6)
    moments = [torch.cat([optimizer.state[p][name] for p in parts]) for name in ("exp_avg", "exp_avg_sq")]
    torch.testing.assert_close(exp_avg.double(), moments[0], rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(exp_avg_sq.double(), moments[1], rtol=2e-5, atol=1e-9)
    torch.testing.assert_close(low, param.bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_epsilon_is_added_after_the_correction(guards: Guards, impl: str) -> None:
    param, grad = torch.ones(4), torch.full((4,), 1e-3)
    moments = torch.zeros(4), torch.zeros(4)
    functional.adamw_step_(param, *moments, grad, scalars(1, eps=1e-3, weight_decay=0.0), num_decayed=4, impl=impl)
    # m̂ = g and sqrt(v̂) = |g| after one step, so the update is lr g / (g + eps) = lr / 2.
    torch.testing.assert_close(param, torch.full((4,), 1 - 0.005), rtol=2e-7, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_empty_shard(guards: Guards, impl: str) -> None:
    nothing = [torch.zeros(0) for _ in range(4)]
    functional.adamw_step_(*nothing, scalars(1), num_decayed=0, impl=impl)
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
