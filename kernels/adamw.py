"""AdamW over the slices of a shard in one launch, and the sum of squares of a gradient, in Triton. Neither waits for
the device.

Bytes per parameter: AdamW reads gradient, master, two moments and writes master, two moments and the low-precision
weight: 28 with 2-byte gradients, 30 with fp32, and 16 for the 1024 of a tile to find them; the sum of squares reads
the gradient once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.adamw_runs import ALIGNMENT, TILE
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


@triton.jit
def _adamw_kernel(
    param, exp_avg, exp_avg_sq, grad, low_precision, scalars, tiles,
    HAS_LOW_PRECISION: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # exp_avg, exp_avg_sq fp32 of the shard; grad, low_precision of the whole buffer; param fp32, laid out as the shard
    # beside a low-precision copy, else as the buffer; scalars fp32 in the order of AdamWScalar;
    # tiles int32 [programs, (flat, state, length, decays)] in multiples of UNIT, which tells Triton of the alignment
    if tl.load(scalars + _FOUND_INF) == 0.0:
        row = tiles + tl.program_id(0) * 4
        lane = tl.arange(0, COLUMNS)
        flat = tl.load(row).to(tl.int64) * UNIT + lane
        state = tl.load(row + 1).to(tl.int64) * UNIT + lane
        mask = lane < tl.load(row + 2) * UNIT
        decay = tl.load(row + 3).to(tl.float32) * tl.load(scalars + _WEIGHT_DECAY)
        if HAS_LOW_PRECISION:
            master = state
        else:
            master = flat
        lr = tl.load(scalars + _LR)
        beta1 = tl.load(scalars + _BETA1)
        beta2 = tl.load(scalars + _BETA2)
        eps = tl.load(scalars + _EPS)
        step_size = 1.0 / tl.load(scalars + _CORRECTION1)
        root = 1.0 / tl.sqrt(tl.load(scalars + _CORRECTION2))
        multiplier = tl.load(scalars + _MULTIPLIER)
        g = tl.load(grad + flat, mask=mask, other=0.0).to(tl.float32) * multiplier
        p = tl.load(param + master, mask=mask, other=0.0)
        # 1 - beta is exact in fp32 for beta in [0.5, 1], so the moments are those of the beta that fp32 holds.
        m = beta1 * tl.load(exp_avg + state, mask=mask, other=0.0) + (1.0 - beta1) * g
        v = beta2 * tl.load(exp_avg_sq + state, mask=mask, other=0.0) + (1.0 - beta2) * g * g
        p -= lr * (m * step_size / (tl.sqrt(v) * root + eps) + decay * p)
        tl.store(param + master, p, mask=mask)
        tl.store(exp_avg + state, m, mask=mask)
        tl.store(exp_avg_sq + state, v, mask=mask)
        if HAS_LOW_PRECISION:
            tl.store(low_precision + flat, p.to(low_precision.dtype.element_ty), mask=mask)


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
    tiles: Tensor,
    low_precision: Tensor | None,
) -> None:
    """Updates ``param``, both moments and ``low_precision`` in place, all flat and contiguous."""
    programs = tiles.shape[0]
    if programs == 0:
        return
    config = launcher.configure("adamw", Config(1, TILE, num_warps=4), grad)
    launcher.launch(
        _adamw_kernel, (programs,), param, exp_avg, exp_avg_sq, grad, low_precision, scalars, tiles,
        config=config, HAS_LOW_PRECISION=low_precision is not None, COLUMNS=TILE, UNIT=ALIGNMENT,
    )  # fmt: skip


def sum_of_squares(grad: Tensor) -> Tensor:
    """Σ grad² as a 0-dimensional fp32 tensor, the same bits every time."""
    grad = grad.contiguous()
    out = torch.zeros((), dtype=torch.float32, device=grad.device)
    n = grad.numel()
    if n == 0:
        return out
    stages = launcher.pipeline_stages(4096 * grad.element_size())
    config = launcher.configure("sum_of_squares", Config(1, 4096, num_warps=8, num_stages=stages), grad)
    programs = min(triton.cdiv(n, config.columns), 4 * launcher.multiprocessors(grad.device))
    partials = torch.empty(programs, dtype=torch.float32, device=grad.device)
    launcher.launch(
        _squares_kernel, (programs,), grad, partials, n, config=config,
        COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    launcher.launch(_total_kernel, (1,), partials, out, programs, config=Config(1, 1024, num_warps=4), COLUMNS=1024)
    return out
