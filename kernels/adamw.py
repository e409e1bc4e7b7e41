"""AdamW over a flat shard and the sum of squares of a gradient, in Triton. Neither waits for the device.

Bytes per parameter: AdamW reads gradient, master, two moments and writes master, two moments and the low-precision
weight: 28 with 2-byte gradients, 30 with fp32; the sum of squares reads the gradient once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.adamw_scalars import AdamWScalar
from trimegatron.kernels.launcher import Config

_LR = tl.constexpr(int(AdamWScalar.LR))
_WEIGHT_DECAY = tl.constexpr(int(AdamWScalar.WEIGHT_DECAY))
_BETA1 = tl.constexpr(int(AdamWScalar.BETA1))
_BETA2 = tl.constexpr(int(AdamWScalar.BETA2))
_EPS = tl.constexpr(int(AdamWScalar.EPS))
_CORRECTION1 = tl.constexpr(int(AdamWScalar.BIAS_CORRECTION1))
_CORRECTION2 = tl.constexpr(int(AdamWScalar.BIAS_CORRECTION2))
_MULTIPLIER = tl.constexpr(int(AdamWScalar.GRAD_MULTIPLIER))
_FOUND_INF = tl.constexpr(int(AdamWScalar.FOUND_INF))


@triton.jit(do_not_specialize=["num_decayed"])
def _adamw_kernel(
    param, exp_avg, exp_avg_sq, grad, low_precision, scalars, n, num_decayed,
    HAS_LOW_PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # param, exp_avg, exp_avg_sq [n] fp32; grad, low_precision [n]; scalars fp32 in the order of AdamWScalar
    if tl.load(scalars + _FOUND_INF) == 0.0:
        lr = tl.load(scalars + _LR)
        weight_decay = tl.load(scalars + _WEIGHT_DECAY)
        beta1 = tl.load(scalars + _BETA1)
        beta2 = tl.load(scalars + _BETA2)
        eps = tl.load(scalars + _EPS)
        step_size = 1.0 / tl.load(scalars + _CORRECTION1)
        root = 1.0 / tl.sqrt(tl.load(scalars + _CORRECTION2))
        multiplier = tl.load(scalars + _MULTIPLIER)
        offset = tl.cast(tl.program_id(0), tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        mask = offset < n
        g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32) * multiplier
        p = tl.load(param + offset, mask=mask, other=0.0)
        # 1 - beta is exact in fp32 for beta in [0.5, 1], so the moments are those of the beta that fp32 holds.
        m = beta1 * tl.load(exp_avg + offset, mask=mask, other=0.0) + (1.0 - beta1) * g
        v = beta2 * tl.load(exp_avg_sq + offset, mask=mask, other=0.0) + (1.0 - beta2) * g * g
        decay = tl.where(offset < num_decayed, weight_decay, 0.0)
        p -= lr * (m * step_size / (tl.sqrt(v) * root + eps) + decay * p)
        tl.store(param + offset, p, mask=mask)
        tl.store(exp_avg + offset, m, mask=mask)
        tl.store(exp_avg_sq + offset, v, mask=mask)
        if HAS_LOW_PRECISION:
            tl.store(low_precision + offset, p.to(low_precision.dtype.element_ty), mask=mask)


@triton.jit
def _squares_kernel(grad, partials, n, COLUMNS: tl.constexpr, STAGES: tl.constexpr):
    # grad [n], partials [programs] fp32
    total = tl.zeros([COLUMNS], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(n, COLUMNS), tl.num_programs(0), num_stages=STAGES):
        offset = tl.cast(block, tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
        g = tl.load(grad + offset, mask=offset < n, other=0.0).to(tl.float32)
        total += g * g
    tl.store(partials + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _total_kernel(partials, out, count, COLUMNS: tl.constexpr):
    index = tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, count, COLUMNS):
        total += tl.load(partials + start + index, mask=start + index < count, other=0.0)
    tl.store(out, tl.sum(total, axis=0))


def adamw_step_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: Tensor,
    num_decayed: int,
    low_precision: Tensor | None,
) -> None:
    """Updates ``param``, both moments and ``low_precision`` in place, all flat and contiguous."""
    n = param.numel()
    if n == 0:
        return
    config = launcher.configure("adamw", Config(1, 1024, num_warps=4))
    launcher.launch(
        _adamw_kernel, (triton.cdiv(n, config.columns),), param, exp_avg, exp_avg_sq, grad, low_precision, scalars,
        n, num_decayed, config=config, HAS_LOW_PRECISION=low_precision is not None, COLUMNS=config.columns,
    )  # fmt: skip


def sum_of_squares(grad: Tensor) -> Tensor:
    """Σ grad² as a 0-dimensional fp32 tensor, the same bits every time."""
    grad = grad.contiguous()
    out = torch.zeros((), dtype=torch.float32, device=grad.device)
    n = grad.numel()
    if n == 0:
        return out
    stages = launcher.pipeline_stages(4096 * grad.element_size())
    config = launcher.configure("sum_of_squares", Config(1, 4096, num_warps=8, num_stages=stages))
    programs = min(triton.cdiv(n, config.columns), 4 * launcher.multiprocessors(grad.device))
    partials = torch.empty(programs, dtype=torch.float32, device=grad.device)
    launcher.launch(
        _squares_kernel, (programs,), grad, partials, n, config=config,
        COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    launcher.launch(_total_kernel, (1,), partials, out, programs, config=Config(1, 1024, num_warps=4), COLUMNS=1024)
    return out
