"""Layer norm in Triton: y = (x - mean) · rstd · weight + bias over the last dimension, statistics in fp32.

Bytes per element (b = bytes of the dtype): forward 2b, backward 3b and the partial sums of the weight's gradients. The
sums of more than 8192 columns do not fit into a program's registers: there a second kernel adds them, and the backward
pass moves 5b.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.column_sum import sum_partials, tile, walkers
from trimegatron.kernels.launcher import Config

_MOST_COLUMNS_SUMMED = 8192


@triton.jit
def _forward_kernel(
    x, weight, bias, y, mean, rstd, rows, eps, HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # x, y [rows, HIDDEN]; weight, bias [HIDDEN]; mean, rstd [rows] fp32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (column < HIDDEN)[None, :]
    mask = (row < rows)[:, None] & inside
    offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    average = tl.sum(value, axis=1) / HIDDEN
    centred = tl.where(inside, value - average[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / HIDDEN + eps)
    result = centred * inverse[:, None] * w[None, :] + b[None, :]
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)
    tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _backward_kernel(
    dy,
    x,
    weight,
    mean,
    rstd,
    dx,
    dweight_partials,
    dbias_partials,
    rows,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # dy, x, dx [rows, HIDDEN]; partials [programs, HIDDEN] fp32. The loop's loads overlap with its reductions.
    column = tl.arange(0, COLUMNS)
    inside = (column < HIDDEN)[None, :]
    w = tl.load(weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & inside
        offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        # Not 0 in padding lanes, but upstream and w are, and nothing adds it up alone.
        normalised = (value - average) * inverse
        dweight += upstream * normalised
        dbias += upstream
        scaled = upstream * w
        along = tl.sum(scaled * normalised, axis=1)[:, None] / HIDDEN
        level = tl.sum(scaled, axis=1)[:, None] / HIDDEN
        gradient = (scaled - level - normalised * along) * inverse
        tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=mask)
    offset = tl.cast(tl.program_id(0), tl.int64) * HIDDEN + column
    tl.store(dweight_partials + offset, tl.sum(dweight, axis=0), mask=column < HIDDEN)
    tl.store(dbias_partials + offset, tl.sum(dbias, axis=0), mask=column < HIDDEN)


@triton.jit
def _normalised_block(dy, x, weight, average, inverse, first, start, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr):
    """Of the block of columns from ``start`` of the row at offset ``first``: dy · weight and (x - mean) · rstd."""
    column = start + tl.arange(0, COLUMNS)
    inside = column < HIDDEN
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + (first + column), mask=inside, other=0.0).to(tl.float32)
    upstream = tl.load(dy + (first + column), mask=inside, other=0.0).to(tl.float32)
    return upstream * w, (value - average) * inverse


@triton.jit
def _long_backward_kernel(
    dy, x, weight, mean, rstd, dx, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr
):
    # dy, x, dx [rows, HIDDEN]; one row, read in blocks twice, the second time from a cache
    row = tl.program_id(0)
    first = tl.cast(row, tl.int64) * HIDDEN
    average = tl.load(mean + row)
    inverse = tl.load(rstd + row)
    along = tl.zeros([COLUMNS], tl.float32)
    level = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        scaled, normalised = _normalised_block(dy, x, weight, average, inverse, first, start, HIDDEN, COLUMNS)
        along += scaled * normalised
        level += scaled
    all_along = tl.sum(along, axis=0) / HIDDEN
    all_level = tl.sum(level, axis=0) / HIDDEN
    for start in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        scaled, normalised = _normalised_block(dy, x, weight, average, inverse, first, start, HIDDEN, COLUMNS)
        gradient = (scaled - all_level - normalised * all_along) * inverse
        column = start + tl.arange(0, COLUMNS)
        tl.store(dx + (first + column), gradient.to(dx.dtype.element_ty), mask=column < HIDDEN)


@triton.jit
def _sums_kernel(
    dy,
    x,
    mean,
    rstd,
    dweight_partials,
    dbias_partials,
    rows,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # The sums of _backward_kernel alone, over a block of columns; partials [num_programs(1), HIDDEN] fp32
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
        offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        dweight += upstream * (value - average) * inverse
        dbias += upstream
    offset = tl.cast(tl.program_id(1), tl.int64) * HIDDEN + column
    tl.store(dweight_partials + offset, tl.sum(dweight, axis=0), mask=column < HIDDEN)
    tl.store(dbias_partials + offset, tl.sum(dbias, axis=0), mask=column < HIDDEN)


def _forward_config(hidden: int) -> Config:
    columns = launcher.power_of_two(hidden)
    num_warps = 4 if columns <= 1024 else 8 if columns <= 4096 else 16 if columns <= 8192 else 32
    config = Config(max(1, min(32, 1024 // columns)), columns, num_warps)
    return launcher.configure("layer_norm_forward", config, hidden=hidden)


def _backward_config(hidden: int, element_size: int) -> Config:
    columns = launcher.power_of_two(hidden)
    rows = max(1, min(32, 1024 // columns))
    num_warps = min(32, max(4, columns // 256))
    stages = launcher.pipeline_stages(2 * rows * columns * element_size)
    return launcher.configure("layer_norm_backward", Config(rows, columns, num_warps, stages), hidden=hidden)


def _long_backward_config(hidden: int, element_size: int) -> Config:
    heuristic = Config(1, 2048, 8, launcher.pipeline_stages(2048 * 3 * element_size))
    return launcher.configure("layer_norm_long_backward", heuristic, hidden=hidden)


def layer_norm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y like x; mean and rstd fp32 of x's leading shape, flattened."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    hidden = x.shape[-1]
    rows = x.numel() // max(1, hidden)
    y = torch.empty_like(x)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if x.numel():
        config = _forward_config(hidden)
        launcher.launch(
            _forward_kernel, (triton.cdiv(rows, config.rows),), x, weight, bias, y, mean, rstd, rows, eps,
            config=config, HIDDEN=hidden, ROWS=config.rows, COLUMNS=config.columns,
        )  # fmt: skip
    return y, mean, rstd


def layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx like x, dweight and dbias like weight."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    dx = torch.empty_like(x)
    apart = x.shape[-1] > _MOST_COLUMNS_SUMMED
    partials = (_backward_of_long_rows if apart else _backward_with_sums)(dy, x, weight, mean, rstd, dx)
    return dx, sum_partials(partials[0], weight.dtype), sum_partials(partials[1], weight.dtype)


def _backward_with_sums(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor) -> Tensor:
    """Writes dx; the partial sums of dweight and dbias, fp32 [2, programs, hidden]."""
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    config = _backward_config(hidden, x.element_size())
    per_multiprocessor = max(1, 32 // config.num_warps)
    programs = min(triton.cdiv(rows, config.rows), per_multiprocessor * launcher.multiprocessors(x.device))
    partials = torch.empty(2, programs, hidden, dtype=torch.float32, device=x.device)
    launcher.launch(
        _backward_kernel, (programs,), dy, x, weight, mean, rstd, dx, partials[0], partials[1], rows,
        config=config, HIDDEN=hidden, ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    return partials


def _backward_of_long_rows(dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor) -> Tensor:
    """The same in two kernels."""
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    config = _long_backward_config(hidden, x.element_size())
    launcher.launch(
        _long_backward_kernel, (rows,), dy, x, weight, mean, rstd, dx, config=config,
        HIDDEN=hidden, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    config = tile("layer_norm_sums", hidden, 2 * x.element_size())
    grid = walkers(rows, hidden, config, x.device)
    partials = torch.empty(2, grid[1], hidden, dtype=torch.float32, device=x.device)
    launcher.launch(
        _sums_kernel, grid, dy, x, mean, rstd, partials[0], partials[1], rows, config=config,
        HIDDEN=hidden, ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    return partials
