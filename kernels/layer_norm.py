"""Layer norm in Triton, y = (x - mean) · rstd · weight + bias over the last dimension, statistics in fp32; alone, and
of a sum that the same kernel makes::

    total = residual + dropout(x + x_bias)        y = norm(total)

x_bias and dropout may be left out. The statistics are those of the rounded total, which is all that backward needs:
what comes back along the residual enters it there, and with dropout the mask is made again.

Bytes per element (b = bytes of the dtype), forward and backward, besides the partial sums of the gradients of weight,
bias and x_bias: norm alone 2b and 3b, of a sum 4b and 4b, with dropout 4b and 5b.

Backward sums over rows in registers, which hold 8192 columns of the sums (4096 with dropout). A wider row is cut into
parts: each program sums and writes one of them, but reads them all, its own one last, since the gradient needs two sums
over the whole row. The programs of a row run side by side, so that all but the first read of a part come from the L2
cache.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher, philox
from trimegatron.kernels.column_sum import sum_partials
from trimegatron.kernels.launcher import Config
from trimegatron.kernels.philox_triton import hidden_keep

_PER_CALL = ["batch", "seed", "stream", "position_offset", "threshold"]  # no compilation for 1 or multiples of 16
_WIDEST_PART = 8192  # and half of it with dropout
# Shared memory for load buffers: with what the reductions and Philox take, below the 99 KB of every architecture.
_BUFFER_BYTES, _DROPOUT_BUFFER_BYTES = 96 << 10, 80 << 10


class Dropout(NamedTuple):
    """What a mask is a function of; see ``philox.py``."""

    sample_numbers: Tensor  # int64 [batch]
    p: float
    seed: int
    site: int
    layer: int
    position_offset: int


@triton.jit
def _weight(weight, column, HIDDEN: tl.constexpr, ZERO_CENTRED: tl.constexpr):
    w = tl.load(weight + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    if ZERO_CENTRED:
        w += 1.0
    return w


@triton.jit(do_not_specialize=_PER_CALL)
def _forward_kernel(
    x,
    x_bias,
    residual,
    total,
    weight,
    bias,
    y,
    mean,
    rstd,
    sample_numbers,
    rows,
    eps,
    batch,
    seed,
    stream,
    position_offset,
    threshold,
    scale,
    HIDDEN: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # x, residual, total, y [rows, HIDDEN]; x_bias, weight, bias [HIDDEN]; mean, rstd [rows] fp32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (column < HIDDEN)[None, :]
    mask = (row < rows)[:, None] & inside
    offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if x_bias is not None:
        value += tl.load(x_bias + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    if sample_numbers is not None:
        keep = hidden_keep(row, 0, batch, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS)
        value = tl.where(keep, value * scale, 0.0)
    if residual is not None:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + offset, rounded, mask=mask)
        value = rounded.to(tl.float32)
    w = _weight(weight, column, HIDDEN, ZERO_CENTRED)
    b = tl.load(bias + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    average = tl.sum(value, axis=1) / HIDDEN
    centred = tl.where(inside, value - average[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=1) / HIDDEN + eps)
    result = centred * inverse[:, None] * w + b
    tl.store(y + offset, result.to(y.dtype.element_ty), mask=mask)
    tl.store(mean + row, average, mask=row < rows)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _step(step, rows, HIDDEN: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    """Rows [R], columns [C], mask and offset [R, C] of a program's ``step``: its own part of a row is the last one."""
    walker, walkers = tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    row = (walker + step // PARTS * walkers) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, COLUMNS)
    column = (tl.program_id(0) % PARTS + 1 + step) % PARTS * WIDTH + lane
    mask = (row < rows)[:, None] & ((lane < WIDTH) & (column < HIDDEN))[None, :]
    return row, column, mask, tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]


@triton.jit(do_not_specialize=_PER_CALL)
def _backward_kernel(
    dy,
    dtotal,
    x,
    weight,
    mean,
    rstd,
    dx,
    dropped,
    dweight_partials,
    dbias_partials,
    dx_bias_partials,
    sample_numbers,
    rows,
    batch,
    seed,
    stream,
    position_offset,
    threshold,
    scale,
    HIDDEN: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # dy, dtotal, x, dx, dropped [rows, HIDDEN], x the normalised tensor; partials [programs // PARTS, HIDDEN] fp32
    walker, walkers = tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    start = tl.program_id(0) % PARTS * WIDTH
    own = start + tl.arange(0, COLUMNS)
    w = _weight(weight, own, HIDDEN, ZERO_CENTRED)
    dweight = tl.zeros([ROWS, COLUMNS], tl.float32)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    dx_bias = tl.zeros([ROWS, COLUMNS], tl.float32)
    along = tl.zeros([ROWS], tl.float32)
    level = tl.zeros([ROWS], tl.float32)
    steps = tl.cdiv(tl.cdiv(rows, ROWS) - walker, walkers) * PARTS
    at = 0  # is ``step``, but what follows from it is not carried through the stages of the loads
    for step in tl.range(0, steps, num_stages=STAGES):
        row, column, mask, offset = _step(step, rows, HIDDEN, PARTS, WIDTH, ROWS, COLUMNS)
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        upstream = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        average = tl.load(mean + row, mask=row < rows, other=0.0)[:, None]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        if PARTS > 1:
            w = _weight(weight, column, HIDDEN, ZERO_CENTRED)
        # Not 0 in padding lanes, but upstream is, and nothing adds it up alone.
        normalised = (value - average) * inverse
        scaled = upstream * w
        along += tl.sum(scaled * normalised, axis=1)
        level += tl.sum(scaled, axis=1)
        if at % PARTS == PARTS - 1:
            row, column, mask, offset = _step(at, rows, HIDDEN, PARTS, WIDTH, ROWS, COLUMNS)
            dweight += upstream * normalised
            dbias += upstream
            gradient = (scaled - (level / HIDDEN)[:, None] - normalised * (along / HIDDEN)[:, None]) * inverse
            if dtotal is not None:
                gradient += tl.load(dtotal + offset, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=mask)
            if sample_numbers is not None:
                keep = hidden_keep(
                    row, start, batch, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS
                )
                gradient = tl.where(keep, gradient * scale, 0.0)
                tl.store(dropped + offset, gradient.to(dropped.dtype.element_ty), mask=mask)
            if dx_bias_partials is not None:
                dx_bias += gradient
            along = tl.zeros([ROWS], tl.float32)
            level = tl.zeros([ROWS], tl.float32)
        at += 1  # noqa: SIM113 (not Python)
    inside = (tl.arange(0, COLUMNS) < WIDTH) & (own < HIDDEN)
    offset = tl.cast(walker, tl.int64) * HIDDEN + own
    tl.store(dweight_partials + offset, tl.sum(dweight, axis=0), mask=inside)
    tl.store(dbias_partials + offset, tl.sum(dbias, axis=0), mask=inside)
    if dx_bias_partials is not None:
        tl.store(dx_bias_partials + offset, tl.sum(dx_bias, axis=0), mask=inside)


def _forward_config(x: Tensor, has_total: bool, has_dropout: bool) -> Config:
    hidden = x.shape[-1]
    columns = max(8, launcher.power_of_two(hidden))
    num_warps = 4 if columns <= 1024 else 8 if columns <= 4096 else 16 if columns <= 8192 else 32
    config = Config(max(1, min(32, 1024 // columns)), columns, num_warps)
    return launcher.configure("layer_norm_forward", config, x, hidden=hidden, total=has_total, dropout=has_dropout)


def _backward_config(x: Tensor, weight_size: int, has_dtotal: bool, has_dropout: bool) -> tuple[Config, int, int]:
    """And the number of parts of a row and their width. Sizes are bytes of an element."""
    hidden, size = x.shape[-1], x.element_size()
    parts = triton.cdiv(hidden, _WIDEST_PART // 2 if has_dropout else _WIDEST_PART)
    width = hidden if parts == 1 else triton.cdiv(triton.cdiv(hidden, parts), 16) * 16
    columns = max(8, launcher.power_of_two(width))
    rows = max(1, min(32, 1024 // columns))
    num_warps = min(16 if has_dtotal and size == 4 else 32, max(4, columns // 256))
    # What the pipeline reads in every step: parts their weight too, but dtotal only outside it.
    per_column = 2 * size + (weight_size if parts > 1 else size if has_dtotal else 0)
    stages = 1 + min(2, (_DROPOUT_BUFFER_BYTES if has_dropout else _BUFFER_BYTES) // (rows * columns * per_column))
    heuristic, shape = Config(rows, columns, num_warps, stages), {"total": has_dtotal, "dropout": has_dropout}
    return launcher.configure("layer_norm_backward", heuristic, x, hidden=hidden, **shape), parts, width


def _mask_arguments(dropout: Dropout | None) -> tuple[Tensor | None, tuple[float, ...]]:
    """The kernels' sample_numbers, and batch, seed, stream, position_offset, threshold, scale."""
    if dropout is None:
        return None, (1, 0, 0, 0, 0, 1.0)
    stream = philox.stream(dropout.site, dropout.layer)
    return dropout.sample_numbers.contiguous(), (
        dropout.sample_numbers.numel(), launcher.signed_word(dropout.seed), launcher.signed_word(stream),
        dropout.position_offset, philox.dropout_threshold(dropout.p), philox.dropout_scale(dropout.p),
    )  # fmt: skip


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    zero_centred: bool,
    *,
    residual: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """total like residual, None without one; y like what is normalised; mean and rstd fp32 of its rows, flattened."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    residual, x_bias = (None if t is None else t.contiguous() for t in (residual, x_bias))
    hidden = x.shape[-1]
    rows = x.numel() // max(1, hidden)
    total = None if residual is None else torch.empty_like(residual)
    y = torch.empty_like(x if residual is None else residual)
    mean = torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    if x.numel():
        config = _forward_config(x, residual is not None, dropout is not None)
        sample_numbers, mask = _mask_arguments(dropout)
        launcher.launch(
            _forward_kernel, (triton.cdiv(rows, config.rows),), x, x_bias, residual, total, weight, bias, y, mean, rstd,
            sample_numbers, rows, eps, *mask, config=config,
            HIDDEN=hidden, ZERO_CENTRED=zero_centred, ROWS=config.rows, COLUMNS=config.columns,
        )  # fmt: skip
    return total, y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centred: bool,
    *,
    dtotal: Tensor | None = None,
    x_bias: Tensor | None = None,
    dropout: Dropout | None = None,
    dropped_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """dx like x, the normalised tensor; dx behind dropout in ``dropped_dtype``; dweight and dbias like weight; dx_bias
    like x_bias. None where there is no dropout or no x_bias."""
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    hidden = x.shape[-1]
    dx = torch.empty_like(x)
    dropped = None if dropout is None else torch.empty_like(x, dtype=dropped_dtype)
    sums = [weight, weight] if x_bias is None else [weight, weight, x_bias]
    if x.numel() == 0:
        dweight, dbias, *rest = (torch.zeros_like(t) for t in sums)
        return dx, dropped, dweight, dbias, rest[0] if rest else None
    rows = x.numel() // hidden
    config, parts, width = _backward_config(x, weight.element_size(), dtotal is not None, dropout is not None)
    walkers = max(1, max(1, 32 // config.num_warps) * launcher.multiprocessors(x.device) // parts)
    walkers = min(triton.cdiv(rows, config.rows), walkers)
    partials = torch.empty(len(sums), walkers, hidden, dtype=torch.float32, device=x.device)
    sample_numbers, mask = _mask_arguments(dropout)
    launcher.launch(
        _backward_kernel, (walkers * parts,), dy, dtotal, x, weight, mean, rstd, dx, dropped, partials[0], partials[1],
        None if x_bias is None else partials[2], sample_numbers, rows, *mask, config=config,
        HIDDEN=hidden, ZERO_CENTRED=zero_centred, PARTS=parts, WIDTH=width,
        ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    dweight, dbias, *rest = (sum_partials(part, t.dtype) for part, t in zip(partials, sums, strict=True))
    return dx, dropped, dweight, dbias, rest[0] if rest else None


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """y like x; mean and rstd fp32 of x's leading shape, flattened."""
    _, y, mean, rstd = forward(x, weight, bias, eps, zero_centred)
    return y, mean, rstd


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centred: bool = False,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx like x, with ``dresidual`` added to it; dweight and dbias like weight."""
    dx, _, dweight, dbias, _ = backward(dy, x, weight, mean, rstd, zero_centred, dtotal=dresidual)
    return dx, dweight, dbias
