"""Dropout of attention probabilities [b, n, sq, sk] in Triton, in the attention mapping of ``philox.py``.

The gradient is the same function of the incoming gradient, so one kernel serves both. 2b bytes per element.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher, philox
from trimegatron.kernels.launcher import Config
from trimegatron.kernels.philox_triton import attention_keep


@triton.jit
def rows_keep(
    row, column_start, rows, heads, queries, sample_numbers, seed, stream, position_offset, threshold,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Mask [R, C] of rows [R] (row = (sample heads + head) queries + query) and C keys from ``column_start``, a
    multiple of 32; ``stream`` is the word of head 0."""
    head = row // queries
    sample = tl.load(sample_numbers + head // heads, mask=row < rows, other=0)
    return attention_keep(
        row % queries, column_start, sample, seed, stream + head % heads, position_offset, threshold, R, C
    )


@triton.jit(do_not_specialize=["seed", "stream", "position_offset", "threshold"])
def _kernel(
    x,
    out,
    sample_numbers,
    rows,
    heads,
    queries,
    keys,
    seed,
    stream,
    position_offset,
    threshold,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # x, out [rows = b n sq, keys]; sample_numbers [b] int64; stream: the word of head 0
    blocks = tl.cdiv(keys, COLUMNS)
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % blocks * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < keys)[None, :]
    offset = tl.cast(row, tl.int64)[:, None] * keys + column[None, :]
    value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    keep = rows_keep(
        row, start, rows, heads, queries, sample_numbers, seed, stream, position_offset, threshold, ROWS, COLUMNS
    )
    value = tl.where(keep, value * scale, 0.0)
    tl.store(out + offset, value.to(out.dtype.element_ty), mask=mask)


def mask_arguments(
    heads: int, p: float, seed: int, layer: int, head_offset: int, position_offset: int
) -> tuple[int | float, ...]:
    """seed, stream, position_offset, threshold and scale as the kernels take them."""
    philox.stream(philox.Site.ATTENTION, layer, head_offset + heads - 1)  # the last head must fit too
    stream = philox.stream(philox.Site.ATTENTION, layer, head_offset)
    words = launcher.signed_word(seed), launcher.signed_word(stream)
    return *words, position_offset, philox.dropout_threshold(p), philox.dropout_scale(p)


def attention_dropout(
    x: Tensor, sample_numbers: Tensor, p: float, seed: int, layer: int, head_offset: int, position_offset: int
) -> Tensor:
    """Like x."""
    x, sample_numbers = x.contiguous(), sample_numbers.contiguous()
    out = torch.empty_like(x)
    if x.numel() == 0:
        return out
    _, heads, queries, keys = x.shape
    rows = x.numel() // keys
    columns = min(256, max(32, launcher.power_of_two(keys)))
    config = launcher.configure("attention_dropout", Config(2048 // columns, columns, num_warps=4), x, keys=keys)
    grid = (triton.cdiv(rows, config.rows) * triton.cdiv(keys, config.columns),)
    launcher.launch(
        _kernel, grid, x, out, sample_numbers, rows, heads, queries, keys,
        *mask_arguments(heads, p, seed, layer, head_offset, position_offset),
        config=config, ROWS=config.rows, COLUMNS=config.columns,
    )  # fmt: skip
    return out
