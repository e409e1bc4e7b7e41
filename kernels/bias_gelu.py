"""Bias and GELU in Triton: y = gelu(x + bias), tanh and erf forms. The activation is made again in the backward pass.

tanh:  gelu(z) = z σ(2u),  u = sqrt(2/π) (z + 0.044715 z³)        (½ (1 + tanh u) = σ(2u))
erf:   gelu(z) = z Φ(z),   Φ the normal distribution

Bytes per element (b = bytes of the dtype): forward 2b, backward 3b with the bias gradient in the same pass,
4b where it also writes the activation, for a weight gradient that needs it next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.column_sum import sum_partials, tile, walkers

# A constant stands to the right of a tensor: from the left Triton 3.9's interpreter makes the product a constexpr.
_TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.jit
def gelu(z, TANH: tl.constexpr):
    """gelu(z), fp32."""
    if TANH:
        gate = tl.sigmoid((z + z * z * z * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
    else:
        gate = tl.erf(z * _SQRT_HALF) * 0.5 + 0.5
    return z * gate


@triton.jit
def gelu_derivative(z, TANH: tl.constexpr):
    """d gelu(z) / dz, fp32."""
    if TANH:
        gate = tl.sigmoid((z + z * z * z * _CUBIC) * _TWICE_SQRT_2_OVER_PI)
        slope = gate * (1.0 - gate) * (1.0 + z * z * 3.0 * _CUBIC) * _TWICE_SQRT_2_OVER_PI
    else:
        gate = tl.erf(z * _SQRT_HALF) * 0.5 + 0.5
        slope = tl.exp(z * z * -0.5) * _INV_SQRT_2PI
    return gate + z * slope


@triton.jit
def _forward_kernel(
    x, bias, y, rows, HIDDEN: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # x, y [rows, HIDDEN]; bias [HIDDEN]
    blocks: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
    offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
    b = tl.load(bias + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    z = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + b[None, :]
    tl.store(y + offset, gelu(z, TANH).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    dy,
    x,
    bias,
    dx,
    activation,
    dbias_partials,
    rows,
    HIDDEN: tl.constexpr,
    TANH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # dy, x, dx, activation [rows, HIDDEN]; dbias_partials [num_programs(1), HIDDEN] fp32
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    b = tl.load(bias + column, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]
    dbias = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in tl.range(tl.program_id(1), tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < HIDDEN)[None, :]
        offset = tl.cast(row, tl.int64)[:, None] * HIDDEN + column[None, :]
        z = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) + b
        upstream = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = upstream * gelu_derivative(z, TANH)
        dbias += gradient  # zero outside the mask, since dy is
        tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=mask)
        if activation is not None:
            tl.store(activation + offset, gelu(z, TANH).to(activation.dtype.element_ty), mask=mask)
    offset = tl.cast(tl.program_id(1), tl.int64) * HIDDEN + column
    tl.store(dbias_partials + offset, tl.sum(dbias, axis=0), mask=column < HIDDEN)


def bias_gelu_forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """y like x."""
    x, bias = x.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        hidden = x.shape[-1]
        rows = x.numel() // hidden
        config = tile("bias_gelu_forward", x)
        grid = (triton.cdiv(rows, config.rows) * triton.cdiv(hidden, config.columns),)
        launcher.launch(
            _forward_kernel, grid, x, bias, y, rows, config=config,
            HIDDEN=hidden, TANH=approximate == "tanh", ROWS=config.rows, COLUMNS=config.columns,
        )  # fmt: skip
    return y


def _backward(
    dy: Tensor, x: Tensor, bias: Tensor, approximate: str, activation: Tensor | None
) -> tuple[Tensor, Tensor]:
    dy, x, bias = dy.contiguous(), x.contiguous(), bias.contiguous()
    dx = torch.empty_like(x)
    if x.numel() == 0:
        return dx, torch.zeros_like(bias)
    hidden = x.shape[-1]
    rows = x.numel() // hidden
    config = tile("bias_gelu_backward", x, tensors=2)
    grid = walkers(rows, hidden, config, x.device)
    partials = torch.empty(grid[1], hidden, dtype=torch.float32, device=x.device)
    launcher.launch(
        _backward_kernel, grid, dy, x, bias, dx, activation, partials, rows, config=config,
        HIDDEN=hidden, TANH=approximate == "tanh", ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages,
    )  # fmt: skip
    return dx, sum_partials(partials, bias.dtype)


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """dx like x, dbias like bias."""
    return _backward(dy, x, bias, approximate, None)


def bias_gelu_backward_with_activation(
    dy: Tensor, x: Tensor, bias: Tensor, approximate: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dx like x, dbias like bias, and the activation again, like x."""
    activation = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return *_backward(dy, x, bias, approximate, activation), activation
