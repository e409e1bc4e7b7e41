"""Bias, dropout and residual in Triton: out = residual + dropout(x + bias) for x [s, b, h]; no mask is stored.

Bytes per element (b = bytes of the dtype): forward 3b, backward 2b with the bias gradient in the same pass (the
residual's gradient is the incoming one itself). Without dropout no Philox is compiled in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher, philox
from trimegatron.kernels.column_sum import sum_partials, tile, walkers
from trimegatron.kernels.philox_triton import hidden_keep

_PER_CALL = ["seed", "stream", "position_offset", "threshold"]  # no compilation of their own for 1 or multiples of 16


@triton.jit(do_not_specialize=_PER_CALL)
def _forward_kernel(
    x,
    bias,
    residual,
    out,
    sample_numbers,
    rows,
    batch,
    seed,
    stream,
    position_offset,
    threshold,
    scale,
    HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # x, residual, out [rows = s b, HIDDEN]; bias [HIDDEN]; sample_numbers [batch] int64
    blocks: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % blocks * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        keep = hidden_keep(row, start, batch, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS)
        value = tl.where(keep, value * scale, 0.0)
    if HAS_RESIDUAL:
        value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_PER_CALL)
def _backward_kernel(
    dout,
    dx,
    dbias_partials,
    sample_numbers,
    rows,
    batch,
    seed,
    stream,
    position_offset,
    threshold,
    scale,
    HIDDEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # dout, dx [rows, HIDDEN]; dbias_partials [num_programs(1), HIDDEN] fp32
    start = tl.program_id(0) * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
        offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
        gradient = tl.load(dout + offset, mask=mask, other=0.0).to(tl.float32)
        keep = hidden_keep(row, start, batch, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS)
        gradient = tl.where(keep, gradient * scale, 0.0)
        if HAS_BIAS:
            dbias += gradient
        tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=mask)
    if HAS_BIAS:
        offset = tl.cast(tl.program_id(1), tl.int64) * HIDDEN + column
        tl.store(dbias_partials + offset, tl.sum(dbias, axis=0), mask=column < HIDDEN)


def bias_dropout_add_forward(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    sample_numbers: Tensor | None,
    p: float,
    seed: int,
    site: int,
    layer: int,
    position_offset: int,
) -> Tensor:
    """out in the residual's dtype, x's without one."""
    x = x.contiguous()
    bias, residual, sample_numbers = (None if t is None else t.contiguous() for t in (bias, residual, sample_numbers))
    out = torch.empty_like(x if residual is None else residual)
    if x.numel() == 0:
        return out
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    config = tile("bias_dropout_add_forward", x, dropout=philox.dropout_threshold(p) > 0)
    grid = (triton.cdiv(rows, config.rows) * triton.cdiv(hidden, config.columns),)
    launcher.launch(
        _forward_kernel, grid, x, bias, residual, out, sample_numbers, rows, x.shape[1],
        launcher.signed_word(seed), launcher.signed_word(philox.stream(site, layer)), position_offset,
        philox.dropout_threshold(p), philox.dropout_scale(p), config=config,
        HIDDEN=hidden, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        DROPOUT=philox.dropout_threshold(p) > 0, ROWS=config.rows, COLUMNS=config.columns,
    )  # fmt: skip
    return out


def bias_dropout_add_backward(
    dout: Tensor,
    bias: Tensor | None,
    sample_numbers: Tensor,
    dtype: torch.dtype,
    p: float,
    seed: int,
    site: int,
    layer: int,
    position_offset: int,
) -> tuple[Tensor, Tensor]:
    """dx in ``dtype``; dbias like bias, empty without one."""
    dout, sample_numbers = dout.contiguous(), sample_numbers.contiguous()
    hidden = dout.shape[-1]
    dx = torch.empty_like(dout, dtype=dtype)
    empty = torch.zeros_like(bias) if bias is not None else torch.empty(0, dtype=dtype, device=dout.device)
    if dout.numel() == 0:
        return dx, empty
    rows = dout.numel() // hidden
    config = tile("bias_dropout_add_backward", dout)
    grid = walkers(rows, hidden, config, dout.device)
    partials = None if bias is None else torch.empty(grid[1], hidden, dtype=torch.float32, device=dout.device)
    launcher.launch(
        _backward_kernel, grid, dout, dx, partials, sample_numbers, rows, dout.shape[1],
        launcher.signed_word(seed), launcher.signed_word(philox.stream(site, layer)), position_offset,
        philox.dropout_threshold(p), philox.dropout_scale(p), config=config,
        HIDDEN=hidden, HAS_BIAS=bias is not None, ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    return dx, empty if bias is None or partials is None else sum_partials(partials, bias.dtype)
