"""Scaled softmax over the keys in Triton, causal or with a boolean mask, for scores [b, n, sq, sk] of any key length,
with or without dropout of the result in the same pass.

y = keep / (1 - p) · softmax(scale · scores) over the visible keys; a row that sees none is zero and has zero gradient.
In the causal form query i sees the keys j <= i + (sk - sq). Rows up to 16384 keys are held in registers (forward 2b
bytes per element, causal 1.5b; backward 3b, causal 2b); longer ones are read twice in blocks, with a running maximum
and sum per lane, and the part that a causal row does not see is only written.

With dropout the bytes are the same: the backward pass needs the probability before dropout, and makes it again from
the scores and each row's maximum and sum rather than have the forward pass write it beside the result. The mask is
made again too (``philox.py``).

The causal limit is rounded up to 16 columns in the loads, since an exact one costs the 128-bit accesses; the exact one
follows in registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.attention_dropout import mask_arguments, rows_keep
from trimegatron.kernels.launcher import Config

_LOG2_E = tl.constexpr(1.4426950408889634)
_LONGEST_ROW_IN_REGISTERS = 16384
_PER_CALL = ["seed", "stream", "position_offset", "threshold"]  # no compilation of their own for 1 or multiples of 16


@triton.jit
def _places(row, column, rows, keys):
    """Offsets (64 bits) of rows [R] and columns [C], and which lie inside the tensor, each [R, C]."""
    inside = (row < rows)[:, None] & (column < keys)[None, :]
    return tl.cast(row, tl.int64)[:, None] * keys + column[None, :], inside


@triton.jit
def _causal(row, column, inside, queries, keys, CAUSAL: tl.constexpr):
    """What to load of rows [R] and columns [C], and what the queries may see, each [R, C]."""
    loaded = inside
    visible = inside
    if CAUSAL:
        last = row % queries + (keys - queries)
        loaded = inside & (column[None, :] < ((last // 16 + 1) * 16)[:, None])
        visible = inside & (column[None, :] <= last[:, None])
    return loaded, visible


@triton.jit
def _load_scores(
    scores, mask, row, column, rows, heads, queries, keys, stride_b, stride_h, stride_q, scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """scale · scores of rows [R] and columns [C] in fp32, −∞ where nothing is visible."""
    offset, inside = _places(row, column, rows, keys)
    loaded, visible = _causal(row, column, inside, queries, keys, CAUSAL)
    if HAS_MASK:
        head = row // queries
        start = (
            tl.cast(head // heads, tl.int64) * stride_b
            + tl.cast(head % heads, tl.int64) * stride_h
            + tl.cast(row % queries, tl.int64) * stride_q
        )
        visible = visible & (tl.load(mask + (start[:, None] + column[None, :]), mask=loaded, other=1) == 0)
    value = tl.load(scores + offset, mask=loaded, other=0.0).to(tl.float32) * scale
    return tl.where(visible, value, float("-inf"))


@triton.jit
def _load_gradient(
    dy, saved, mask, highest, total, sample_numbers, row, start, rows, heads, queries, keys,
    stride_b, stride_h, stride_q, scale, seed, stream, position_offset, threshold, dropout_scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Probability before dropout and its gradient, fp32 [ROWS, COLUMNS] from column ``start``; both are zero where
    nothing is visible, whatever the incoming gradient holds there."""
    column = start + tl.arange(0, COLUMNS)
    offset, inside = _places(row, column, rows, keys)
    loaded, visible = _causal(row, column, inside, queries, keys, CAUSAL)
    upstream = tl.load(dy + offset, mask=loaded, other=0.0).to(tl.float32)
    if DROPOUT:
        value = _load_scores(
            saved, mask, row, column, rows, heads, queries, keys, stride_b, stride_h, stride_q, scale, CAUSAL, HAS_MASK
        )
        visible = value != float("-inf")
        weight = tl.exp2((value - highest[:, None]) * _LOG2_E) * (1.0 / total)[:, None]
        keep = rows_keep(
            row, start, rows, heads, queries, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS
        )
        upstream = tl.where(keep, upstream * dropout_scale, 0.0)
    else:
        weight = tl.load(saved + offset, mask=loaded, other=0.0).to(tl.float32)
    return tl.where(visible, weight, 0.0), tl.where(visible, upstream, 0.0)


@triton.jit
def _row_end(row, queries, keys, CAUSAL: tl.constexpr):
    """The number of keys that the row may see."""
    end = keys
    if CAUSAL:
        end = tl.minimum(keys, tl.maximum(0, row % queries + (keys - queries) + 1))
    return end


@triton.jit
def _store_zeros(out, first, end, keys, COLUMNS: tl.constexpr):
    """Zeros from the first block of ``COLUMNS`` that begins at or after ``end`` to the row's end."""
    for start in tl.range(tl.cdiv(end, COLUMNS) * COLUMNS, keys, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        zeros = tl.zeros([COLUMNS], out.dtype.element_ty)
        tl.store(out + (first + column), zeros, mask=column < keys)


@triton.jit(do_not_specialize=_PER_CALL)
def _forward_kernel(
    scores, mask, y, highest, total, sample_numbers, rows, heads, queries, keys, stride_b, stride_h, stride_q, scale,
    seed, stream, position_offset, threshold, dropout_scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # scores, y [rows = b n sq, keys]; mask uint8 with the given strides, 1 = masked; highest, total [rows] fp32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    offset, inside = _places(row, column, rows, keys)
    value = _load_scores(
        scores, mask, row, column, rows, heads, queries, keys, stride_b, stride_h, stride_q, scale, CAUSAL, HAS_MASK
    )
    top = tl.max(value, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2((value - top[:, None]) * _LOG2_E)
    sum_all = tl.sum(weight, axis=1)
    sum_all = tl.where(sum_all == 0.0, 1.0, sum_all)
    weight = weight * (1.0 / sum_all)[:, None]
    if DROPOUT:
        keep = rows_keep(
            row, 0, rows, heads, queries, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS
        )
        weight = tl.where(keep, weight * dropout_scale, 0.0)
        tl.store(highest + row, top, mask=row < rows)
        tl.store(total + row, sum_all, mask=row < rows)
    tl.store(y + offset, weight.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_PER_CALL)
def _backward_kernel(
    dy, saved, mask, dx, highest, total, sample_numbers, rows, heads, queries, keys, stride_b, stride_h, stride_q,
    scale, seed, stream, position_offset, threshold, dropout_scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # dy, dx [rows, keys]; saved [rows, keys] is y, with DROPOUT the scores. y is zero where nothing is visible, so
    # only the scores need the mask.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.zeros([ROWS], tl.float32)
    sum_all = tl.zeros([ROWS], tl.float32)
    if DROPOUT:
        top = tl.load(highest + row, mask=row < rows, other=0.0)
        sum_all = tl.load(total + row, mask=row < rows, other=1.0)
    weight, upstream = _load_gradient(
        dy, saved, mask, top, sum_all, sample_numbers, row, 0, rows, heads, queries, keys,
        stride_b, stride_h, stride_q, scale, seed, stream, position_offset, threshold, dropout_scale,
        CAUSAL, HAS_MASK, DROPOUT, ROWS, COLUMNS,
    )  # fmt: skip
    level = tl.sum(weight * upstream, axis=1)[:, None]
    offset, inside = _places(row, tl.arange(0, COLUMNS), rows, keys)
    tl.store(dx + offset, (weight * (upstream - level) * scale).to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_PER_CALL)
def _long_forward_kernel(
    scores, mask, y, highest, total, sample_numbers, rows, heads, queries, keys, stride_b, stride_h, stride_q, scale,
    seed, stream, position_offset, threshold, dropout_scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.cast(tl.program_id(0), tl.int64) * keys
    end = _row_end(tl.program_id(0), queries, keys, CAUSAL)
    lane_highest = tl.full([1, COLUMNS], float("-inf"), tl.float32)
    lane_total = tl.zeros([1, COLUMNS], tl.float32)
    for start in tl.range(0, end, COLUMNS, num_stages=STAGES):
        value = _load_scores(
            scores, mask, row, start + tl.arange(0, COLUMNS), rows, heads, queries, keys, stride_b, stride_h, stride_q,
            scale, CAUSAL, HAS_MASK,
        )  # fmt: skip
        higher = tl.maximum(lane_highest, value)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        lane_total = lane_total * tl.exp2((lane_highest - level) * _LOG2_E) + tl.exp2((value - level) * _LOG2_E)
        lane_highest = higher
    top = tl.max(lane_highest, axis=1)
    top = tl.where(top == float("-inf"), 0.0, top)
    sum_all = tl.sum(lane_total * tl.exp2((lane_highest - top[:, None]) * _LOG2_E), axis=1)
    sum_all = tl.where(sum_all == 0.0, 1.0, sum_all)
    if DROPOUT:
        tl.store(highest + row, top)
        tl.store(total + row, sum_all)
    for start in tl.range(0, end, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        value = _load_scores(
            scores, mask, row, column, rows, heads, queries, keys, stride_b, stride_h, stride_q, scale, CAUSAL, HAS_MASK
        )
        weight = tl.exp2((value - top[:, None]) * _LOG2_E) * (1.0 / sum_all)[:, None]
        if DROPOUT:
            keep = rows_keep(
                row, start, rows, heads, queries, sample_numbers, seed, stream, position_offset, threshold, 1, COLUMNS
            )
            weight = tl.where(keep, weight * dropout_scale, 0.0)
        tl.store(y + (first + column)[None, :], weight.to(y.dtype.element_ty), mask=(column < keys)[None, :])
    if CAUSAL:
        _store_zeros(y, first, end, keys, COLUMNS)


@triton.jit(do_not_specialize=_PER_CALL)
def _long_backward_kernel(
    dy, saved, mask, dx, highest, total, sample_numbers, rows, heads, queries, keys, stride_b, stride_h, stride_q,
    scale, seed, stream, position_offset, threshold, dropout_scale,
    CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) + tl.arange(0, 1)
    first = tl.cast(tl.program_id(0), tl.int64) * keys
    end = _row_end(tl.program_id(0), queries, keys, CAUSAL)
    top = tl.zeros([1], tl.float32)
    sum_all = tl.zeros([1], tl.float32)
    if DROPOUT:
        top = tl.load(highest + row)
        sum_all = tl.load(total + row)
    along = tl.zeros([1, COLUMNS], tl.float32)
    for start in tl.range(0, end, COLUMNS, num_stages=STAGES):
        weight, upstream = _load_gradient(
            dy, saved, mask, top, sum_all, sample_numbers, row, start, rows, heads, queries, keys,
            stride_b, stride_h, stride_q, scale, seed, stream, position_offset, threshold, dropout_scale,
            CAUSAL, HAS_MASK, DROPOUT, 1, COLUMNS,
        )  # fmt: skip
        along += weight * upstream
    level = tl.sum(along, axis=1)[:, None]
    for start in tl.range(0, end, COLUMNS, num_stages=STAGES):
        weight, upstream = _load_gradient(
            dy, saved, mask, top, sum_all, sample_numbers, row, start, rows, heads, queries, keys,
            stride_b, stride_h, stride_q, scale, seed, stream, position_offset, threshold, dropout_scale,
            CAUSAL, HAS_MASK, DROPOUT, 1, COLUMNS,
        )  # fmt: skip
        column = start + tl.arange(0, COLUMNS)
        gradient = (weight * (upstream - level) * scale).to(dx.dtype.element_ty)
        tl.store(dx + (first + column)[None, :], gradient, mask=(column < keys)[None, :])
    if CAUSAL:
        _store_zeros(dx, first, end, keys, COLUMNS)


def _config(op: str, scores: Tensor, reads: int) -> Config:
    keys = scores.shape[-1]
    columns = max(32, launcher.power_of_two(keys))  # the masks' mapping repeats after 32
    if keys > _LONGEST_ROW_IN_REGISTERS:
        stages = launcher.pipeline_stages(2048 * reads * scores.element_size(), most=4)
        return launcher.configure(f"long_{op}", Config(1, 2048, 8, stages), scores, keys=keys)
    num_warps = 4 if columns <= 1024 else 8 if columns <= 4096 else 16
    heuristic = Config(max(1, min(32, 1024 // columns)), columns, num_warps)
    return launcher.configure(op, heuristic, scores, keys=keys)


_NO_DROPOUT = (0, 0, 0, 0, 1.0)


def _launch(kernels, op: str, tensors: tuple[Tensor | None, ...], scores: Tensor, mask: Tensor | None, scale: float,
            causal: bool, dropout: tuple[int | float, ...], reads: int) -> None:  # fmt: skip
    """Run the short or the long one of ``kernels`` with one argument list: ``tensors``, then shape, mask and dropout.
    ``reads`` is how many tensors like ``scores`` it reads."""
    _, heads, queries, keys = scores.shape
    rows = scores.numel() // keys
    strides = (0, 0, 0) if mask is None else mask.expand(scores.shape).stride()[:3]
    config = _config(op, scores, reads)
    flags = {"CAUSAL": causal, "HAS_MASK": mask is not None, "DROPOUT": tensors[-1] is not None}
    arguments = (*tensors, rows, heads, queries, keys, *strides, scale, *dropout)
    short, long = kernels
    if keys > _LONGEST_ROW_IN_REGISTERS:
        tile = {"COLUMNS": config.columns, "STAGES": config.num_stages}
        launcher.launch(long, (rows,), *arguments, config=config, **flags, **tile)
    else:
        tile = {"ROWS": config.rows, "COLUMNS": config.columns}
        launcher.launch(short, (triton.cdiv(rows, config.rows),), *arguments, config=config, **flags, **tile)


def _mask_bytes(mask: Tensor | None, scores: Tensor) -> Tensor | None:
    """The mask as bytes with all keys next to each other."""
    if mask is None:
        return None
    if mask.shape[-1] != scores.shape[-1] or mask.stride(-1) != 1:
        mask = mask.expand(*mask.shape[:-1], scores.shape[-1]).contiguous()
    return mask.view(torch.uint8)


def _forward(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    scores = scores.contiguous()
    y = torch.empty_like(scores)
    if scores.numel():
        mask = _mask_bytes(mask, scores)
        tensors = (scores, mask, y, None, None, None)
        _launch(
            (_forward_kernel, _long_forward_kernel), "softmax_forward", tensors, scores, mask, scale, causal,
            _NO_DROPOUT, reads=1,
        )  # fmt: skip
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
    if y.numel():
        tensors = (dy, y, None, dx, None, None, None)
        _launch(
            (_backward_kernel, _long_backward_kernel), "softmax_backward", tensors, y, None, scale, causal,
            _NO_DROPOUT, reads=2,
        )  # fmt: skip
    return dx


def softmax_dropout_forward(
    scores: Tensor, mask: Tensor | None, sample_numbers: Tensor, scale: float, causal: bool,
    p: float, seed: int, layer: int, head_offset: int, position_offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y like scores; maximum and sum of each row, fp32 [2, rows]."""
    scores, sample_numbers = scores.contiguous(), sample_numbers.contiguous()
    y = torch.empty_like(scores)
    statistics = torch.empty(2, scores.shape[:-1].numel(), dtype=torch.float32, device=scores.device)
    if scores.numel():
        mask = _mask_bytes(mask, scores)
        tensors = (scores, mask, y, statistics[0], statistics[1], sample_numbers)
        dropout = mask_arguments(scores.shape[1], p, seed, layer, head_offset, position_offset)
        _launch(
            (_forward_kernel, _long_forward_kernel), "softmax_dropout_forward", tensors, scores, mask, scale, causal,
            dropout, reads=1,
        )  # fmt: skip
    return y, statistics


def softmax_dropout_backward(
    dy: Tensor, scores: Tensor, mask: Tensor | None, statistics: Tensor, sample_numbers: Tensor, scale: float,
    causal: bool, p: float, seed: int, layer: int, head_offset: int, position_offset: int,
) -> Tensor:  # fmt: skip
    """dx = scale · w (d - Σ w d) with w the probability before dropout and d = keep / (1 - p) · dy; like scores."""
    dy, scores, sample_numbers = dy.contiguous(), scores.contiguous(), sample_numbers.contiguous()
    dx = torch.empty_like(scores)
    if scores.numel():
        mask = _mask_bytes(mask, scores)
        tensors = (dy, scores, mask, dx, statistics[0], statistics[1], sample_numbers)
        dropout = mask_arguments(scores.shape[1], p, seed, layer, head_offset, position_offset)
        _launch(
            (_backward_kernel, _long_backward_kernel), "softmax_dropout_backward", tensors, scores, mask, scale, causal,
            dropout, reads=2,
        )  # fmt: skip
    return dx
