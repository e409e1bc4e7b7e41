"""Scaled softmax over the keys in Triton, causal or with a boolean mask, for scores [b, n, sq, sk] of any key length.

y = softmax(scale · scores) over the visible keys; a row that sees none is zero and has zero gradient. In the causal
form query i sees the keys j <= i + (sk - sq). Rows up to 16384 keys are held in registers (forward 2b bytes per
element, causal 1.5b; backward 3b, causal 2b); longer ones are read twice in blocks, with a running maximum and sum per
lane.

The causal limit is rounded up to 16 columns in the loads, since an exact one costs the 128-bit accesses; the exact one
follows in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.launcher import Config

_LOG2_E = tl.constexpr(1.4426950408889634)
_LONGEST_ROW_IN_REGISTERS = 16384


@triton.jit
def _visible(row, column, heads, queries, keys, mask, stride_b, stride_h, stride_q, inside,
             CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr):  # fmt: skip
    """(what to load, what counts) of a tile: rows [R], columns [C], ``inside`` [R, C] -> two bool [R, C]."""
    query = row % queries
    loaded = inside
    counted = inside
    if CAUSAL:
        last = query + (keys - queries)
        loaded = inside & (column[None, :] < ((last // 16 + 1) * 16)[:, None])
        counted = inside & (column[None, :] <= last[:, None])
    if HAS_MASK:
        head = row // queries
        start = (
            tl.cast(head // heads, tl.int64) * stride_b
            + tl.cast(head % heads, tl.int64) * stride_h
            + tl.cast(query, tl.int64) * stride_q
        )
        masked = tl.load(mask + (start[:, None] + column[None, :]), mask=inside, other=1)
        counted = inside & (masked == 0)
    return loaded, counted


@triton.jit
def _forward_kernel(
    scores,
    mask,
    y,
    rows,
    heads,
    queries,
    keys,
    stride_b,
    stride_h,
    stride_q,
    scale,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # scores, y [rows = b n sq, keys]; mask uint8 with the given strides, 1 = masked
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < keys)[None, :]
    offset = tl.cast(row, tl.int64)[:, None] * keys + column[None, :]
    loaded, counted = _visible(
        row, column, heads, queries, keys, mask, stride_b, stride_h, stride_q, inside, CAUSAL, HAS_MASK
    )
    value = tl.load(scores + offset, mask=loaded, other=0.0).to(tl.float32) * scale
    value = tl.where(counted, value, float("-inf"))
    highest = tl.max(value, axis=1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight = tl.exp2((value - highest[:, None]) * _LOG2_E)
    total = tl.sum(weight, axis=1)
    weight = weight / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(y + offset, weight.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy,
    y,
    dx,
    rows,
    queries,
    keys,
    scale,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # dy, y, dx [rows, keys]. Where nothing is visible y is zero, so no mask is needed.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < keys)[None, :]
    offset = tl.cast(row, tl.int64)[:, None] * keys + column[None, :]
    loaded, counted = _visible(row, column, 1, queries, keys, y, 0, 0, 0, inside, CAUSAL, False)
    weight = tl.load(y + offset, mask=loaded, other=0.0).to(tl.float32)
    upstream = tl.load(dy + offset, mask=loaded, other=0.0).to(tl.float32)
    # An incoming gradient may hold anything where the causal mask hides the key.
    product = tl.where(counted, weight * upstream, 0.0)
    along = tl.sum(product, axis=1)
    gradient = tl.where(counted, (product - weight * along[:, None]) * scale, 0.0)
    tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _long_forward_kernel(
    scores,
    mask,
    y,
    rows,
    heads,
    queries,
    keys,
    stride_b,
    stride_h,
    stride_q,
    scale,
    CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.cast(row, tl.int64)[:, None] * keys
    highest = tl.full([1, COLUMNS], float("-inf"), tl.float32)
    total = tl.zeros([1, COLUMNS], tl.float32)
    for start in tl.range(0, keys, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        offset = first + column[None, :]
        inside = (column < keys)[None, :] & (row < rows)[:, None]
        loaded, counted = _visible(
            row, column, heads, queries, keys, mask, stride_b, stride_h, stride_q, inside, CAUSAL, HAS_MASK
        )
        value = tl.load(scores + offset, mask=loaded, other=0.0).to(tl.float32) * scale
        value = tl.where(counted, value, float("-inf"))
        higher = tl.maximum(highest, value)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((highest - level) * _LOG2_E) + tl.exp2((value - level) * _LOG2_E)
        highest = higher
    top = tl.max(highest, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    sum_all = tl.sum(total * tl.exp2((highest - top[:, None]) * _LOG2_E), axis=1)
    sum_all = tl.where(sum_all == 0.0, 1.0, sum_all)
    for start in tl.range(0, keys, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        offset = first + column[None, :]
        inside = (column < keys)[None, :] & (row < rows)[:, None]
        loaded, counted = _visible(
            row, column, heads, queries, keys, mask, stride_b, stride_h, stride_q, inside, CAUSAL, HAS_MASK
        )
        value = tl.load(scores + offset, mask=loaded, other=0.0).to(tl.float32) * scale
        value = tl.where(counted, value, float("-inf"))
        weight = tl.exp2((value - top[:, None]) * _LOG2_E) / sum_all[:, None]
        tl.store(y + offset, weight.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _long_backward_kernel(
    dy,
    y,
    dx,
    rows,
    queries,
    keys,
    scale,
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.cast(row, tl.int64)[:, None] * keys
    along = tl.zeros([1, COLUMNS], tl.float32)
    for start in tl.range(0, keys, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        offset = first + column[None, :]
        inside = (column < keys)[None, :] & (row < rows)[:, None]
        loaded, counted = _visible(row, column, 1, queries, keys, y, 0, 0, 0, inside, CAUSAL, False)
        weight = tl.load(y + offset, mask=loaded, other=0.0).to(tl.float32)
        upstream = tl.load(dy + offset, mask=loaded, other=0.0).to(tl.float32)
        along += tl.where(counted, weight * upstream, 0.0)
    level = tl.sum(along, axis=1)[:, None]
    for start in tl.range(0, keys, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        offset = first + column[None, :]
        inside = (column < keys)[None, :] & (row < rows)[:, None]
        loaded, counted = _visible(row, column, 1, queries, keys, y, 0, 0, 0, inside, CAUSAL, False)
        weight = tl.load(y + offset, mask=loaded, other=0.0).to(tl.float32)
        upstream = tl.load(dy + offset, mask=loaded, other=0.0).to(tl.float32)
        gradient = tl.where(counted, weight * (upstream - level) * scale, 0.0)
        tl.store(dx + offset, gradient.to(dx.dtype.element_ty), mask=inside)


def _config(op: str, keys: int, bytes_per_column: int) -> Config:
    columns = launcher.power_of_two(keys)
    if keys > _LONGEST_ROW_IN_REGISTERS:
        heuristic = Config(1, 4096, 8, launcher.pipeline_stages(4096 * bytes_per_column))
    else:
        num_warps = 4 if columns <= 1024 else 8 if columns <= 4096 else 16
        heuristic = Config(max(1, min(32, 1024 // columns)), columns, num_warps)
    return launcher.configure(op, heuristic, keys=keys)


def _forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    scores = scores.contiguous()
    y = torch.empty_like(scores)
    if scores.numel() == 0:
        return y
    strides: tuple[int, ...] = (0, 0, 0)
    if mask is not None:
        if mask.shape[-1] != scores.shape[-1] or mask.stride(-1) != 1:
            mask = mask.expand(*mask.shape[:-1], scores.shape[-1]).contiguous()
        mask = mask.view(torch.uint8)
        strides = mask.expand(scores.shape).stride()[:3]
    _, heads, queries, keys = scores.shape
    rows = scores.numel() // keys
    config = _config("softmax_forward", keys, scores.element_size())
    arguments = (scores, mask, y, rows, heads, queries, keys, *strides, scale)
    flags = {"CAUSAL": causal, "HAS_MASK": mask is not None, "COLUMNS": config.columns}
    if keys > _LONGEST_ROW_IN_REGISTERS:
        launcher.launch(
            _long_forward_kernel, (rows,), *arguments, config=config, **flags, STAGES=config.num_stages
        )  # fmt: skip
    else:
        grid = (triton.cdiv(rows, config.rows),)
        launcher.launch(_forward_kernel, grid, *arguments, config=config, **flags, ROWS=config.rows)
    return y


def scaled_causal_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """Like scores."""
    return _forward(scores, None, scale, causal=True)


def scaled_masked_softmax_forward(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Like scores; ``mask`` is bool, broadcastable to them, True = masked."""
    return _forward(scores, mask, scale, causal=False)


def scaled_softmax_backward(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """dx = scale · y (dy - Σ y dy), like y."""
    dy, y = dy.contiguous(), y.contiguous()
    dx = torch.empty_like(y)
    if y.numel() == 0:
        return dx
    queries, keys = y.shape[-2:]
    rows = y.numel() // keys
    config = _config("softmax_backward", keys, 2 * y.element_size())
    arguments = (dy, y, dx, rows, queries, keys, scale)
    if keys > _LONGEST_ROW_IN_REGISTERS:
        launcher.launch(
            _long_backward_kernel, (rows,), *arguments, config=config,
            CAUSAL=causal, COLUMNS=config.columns, STAGES=config.num_stages,
        )  # fmt: skip
    else:
        launcher.launch(
            _backward_kernel, (triton.cdiv(rows, config.rows),), *arguments, config=config,
            CAUSAL=causal, ROWS=config.rows, COLUMNS=config.columns,
        )  # fmt: skip
    return dx
