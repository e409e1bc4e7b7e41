"""Cross entropy in Triton over logits [rows, v], this rank's columns of a vocabulary of V words, in fp32.

The statistics of a row are its maximum, Σ exp(logit - maximum), the target's logit (-inf where it is none of these
columns) and, where labels are smoothed, Σ logit. Over all columns they give the loss, and with the logarithm of the
sum of exponentials the gradient::

    loss    = log Σ exp(logit) - confidence · logit[target] - floor · Σ logit          confidence + V · floor = 1
    dlogits = (exp(logit - log Σ exp(logit)) - floor - confidence · [column = target]) · dloss

Columns from ``num_valid`` on are padding: they take no probability and have zero gradient. A row whose target is
``ignore_index`` has zero loss and gradient.

Bytes per logit (b = bytes of the dtype): statistics b, gradient 2b. Where the incoming gradient is known beforehand one
kernel makes loss and gradient, in two sweeps over a row of which the second reads from the L2 cache: 2b together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.cross_entropy_rows import gradient_of, row_ends, row_statistics, row_tile, target_logit
from trimegatron.kernels.launcher import Config

_PER_CALL = ["rows", "vocab_start", "num_valid", "ignore_index"]  # no compilation of their own for 1 or multiples of 16


@triton.jit(do_not_specialize=_PER_CALL)
def _statistics_kernel(
    logits,
    target,
    statistics,
    rows,
    vocab_start,
    num_valid,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # logits [rows, V], target [rows] int64, statistics [3 or 4, rows] fp32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    first = tl.cast(row, tl.int64) * V
    top, total, summed = row_statistics(logits, here, first, num_valid, V, GROUP, SMOOTHED, ROWS, COLUMNS, STAGES)
    word = tl.load(target + row, mask=here, other=0) - vocab_start
    place = statistics + tl.cast(row, tl.int64)
    stride = tl.cast(rows, tl.int64)
    tl.store(place, top, mask=here)
    tl.store(place + stride, total, mask=here)
    tl.store(place + stride * 2, target_logit(logits, here, first, word, num_valid), mask=here)
    if SMOOTHED:
        tl.store(place + stride * 3, summed, mask=here)


@triton.jit
def _loss_of_rows(
    logits,
    target,
    loss,
    log_sum_exp,
    row,
    rows,
    num_valid,
    ignore_index,
    confidence,
    floor,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes both results of rows [R]; returns log Σ exp and the targets."""
    here = row < rows
    first = tl.cast(row, tl.int64) * V
    top, total, summed = row_statistics(logits, here, first, num_valid, V, GROUP, SMOOTHED, ROWS, COLUMNS, STAGES)
    word = tl.load(target + row, mask=here, other=0)
    lse = top + tl.log(total)
    value = lse - target_logit(logits, here, first, word, num_valid) * confidence
    if SMOOTHED:
        value -= summed * floor
    tl.store(loss + row, tl.where(word == ignore_index, 0.0, value), mask=here)
    tl.store(log_sum_exp + row, lse, mask=here)
    return lse, word


@triton.jit(do_not_specialize=_PER_CALL)
def _loss_kernel(
    logits,
    target,
    loss,
    log_sum_exp,
    rows,
    num_valid,
    ignore_index,
    confidence,
    floor,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # logits [rows, V]; target [rows] int64; loss, log_sum_exp [rows] fp32
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _loss_of_rows(logits, target, loss, log_sum_exp, row, rows, num_valid, ignore_index, confidence, floor,
                  V, GROUP, SMOOTHED, ROWS, COLUMNS, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=_PER_CALL)
def _loss_and_gradient_kernel(
    logits,
    target,
    loss,
    log_sum_exp,
    rows,
    num_valid,
    ignore_index,
    confidence,
    floor,
    upstream,
    dlogits,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    # As above; upstream [rows] fp32, dlogits [rows, V]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lse, word = _loss_of_rows(logits, target, loss, log_sum_exp, row, rows, num_valid, ignore_index, confidence, floor,
                              V, GROUP, SMOOTHED, ROWS, COLUMNS, STAGES)  # fmt: skip
    here = row < rows
    first = tl.cast(row, tl.int64) * V
    dloss = tl.load(upstream + row, mask=here, other=0.0)
    ignored = word == ignore_index
    at = 0  # is ``start``, but what follows from it is not carried through the stages of the loads
    for start in tl.range(0, V if V % GROUP == 0 else V + GROUP, COLUMNS, num_stages=STAGES):
        offset, _, mask = row_tile(start, here, first, V, GROUP, COLUMNS)
        value = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
        offset, column, mask = row_tile(at, here, first, V, GROUP, COLUMNS)
        gradient = gradient_of(value, column, lse, dloss, word, num_valid, ignored, confidence, floor)
        tl.store(dlogits + offset, gradient.to(dlogits.dtype.element_ty), mask=mask)
        at += COLUMNS
    if V % GROUP != 0:
        offset, column, mask = row_ends(here, first, V, GROUP)
        value = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = gradient_of(value, column, lse, dloss, word, num_valid, ignored, confidence, floor)
        tl.store(dlogits + offset, gradient.to(dlogits.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_PER_CALL)
def _gradient_kernel(
    logits,
    target,
    log_sum_exp,
    dloss,
    upstream,
    out,
    rows,
    vocab_start,
    num_valid,
    ignore_index,
    confidence,
    floor,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    MEND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # logits, out [rows, V], perhaps one; target [rows] int64; log_sum_exp, dloss, upstream [rows] fp32
    lanes: tl.constexpr = V if V % GROUP == 0 else V + GROUP
    blocks: tl.constexpr = (lanes + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % blocks * COLUMNS
    here = row < rows
    first = tl.cast(row, tl.int64) * V
    scale = tl.load(dloss + row, mask=here, other=0.0)
    if MEND:  # only the rows that were made for another gradient; the others are not touched
        here = here & (scale != tl.load(upstream + row, mask=here, other=0.0))
    lse = tl.load(log_sum_exp + row, mask=here, other=0.0)
    word = tl.load(target + row, mask=here, other=0)
    ignored = word == ignore_index
    word -= vocab_start
    offset, column, mask = row_tile(start, here, first, V, GROUP, COLUMNS)
    value = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
    gradient = gradient_of(value, column, lse, scale, word, num_valid, ignored, confidence, floor)
    tl.store(out + offset, gradient.to(out.dtype.element_ty), mask=mask)
    if V % GROUP != 0:
        offset, column, mask = row_ends(here & (row * 0 + start == 0), first, V, GROUP)
        value = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
        gradient = gradient_of(value, column, lse, scale, word, num_valid, ignored, confidence, floor)
        tl.store(out + offset, gradient.to(out.dtype.element_ty), mask=mask)


def _config(op: str, logits: Tensor, tile_bytes: int, most_stages: int, thread_bytes: int = 32) -> Config:
    """A tile of up to ``tile_bytes`` of a row, ``thread_bytes`` of it a thread's; several rows where they are short."""
    size, columns = logits.element_size(), logits.shape[-1]
    width = max(16 // size, min(tile_bytes // size, launcher.power_of_two(columns)))
    rows = max(1, min(32, 1024 // width))
    num_warps = max(4, width * size // (32 * thread_bytes))
    stages = launcher.pipeline_stages(rows * width * size, most_stages)
    return launcher.configure(op, Config(rows, width, num_warps, stages), logits, columns=columns)


def _shape(logits: Tensor) -> dict[str, int]:
    return {"V": logits.shape[-1], "GROUP": 16 // logits.element_size()}


def cross_entropy_statistics(
    logits: Tensor, target: Tensor, vocab_start: int, num_valid: int, smoothed: bool
) -> Tensor:
    """[3, or 4 where smoothed, *target's shape] fp32: maximum, Σ exp(logit - maximum), target's logit, Σ logit."""
    logits, target = logits.contiguous(), target.contiguous()
    statistics = torch.empty(3 + smoothed, *target.shape, dtype=torch.float32, device=logits.device)
    rows = target.numel()
    if rows:
        config = _config("cross_entropy_statistics", logits, 8 << 10, 3)
        launcher.launch(
            _statistics_kernel, (triton.cdiv(rows, config.rows),), logits, target, statistics, rows, vocab_start,
            num_valid, config=config, SMOOTHED=smoothed, ROWS=config.rows, COLUMNS=config.columns,
            STAGES=config.num_stages, **_shape(logits),
        )  # fmt: skip
    return statistics


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | None,
    num_valid: int,
    ignore_index: int,
    confidence: float,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """loss and log Σ exp, fp32 of target's shape; dlogits for ``upstream``, like logits, empty without it."""
    logits, target = logits.contiguous(), target.contiguous()
    loss = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    log_sum_exp = torch.empty_like(loss)
    dlogits = torch.empty(0, dtype=logits.dtype, device=logits.device)
    rows = target.numel()
    arguments = [logits, target, loss, log_sum_exp, rows, num_valid, ignore_index, confidence, floor]
    if upstream is None:
        kernel, config = _loss_kernel, _config("cross_entropy_loss", logits, 8 << 10, 3)
    else:
        # 32 or 16 warps, so that one or two rows are in work on a multiprocessor and all of them in the L2 cache.
        thread_bytes = 16 if logits.shape[-1] * logits.element_size() > 128 << 10 else 32
        config = _config("cross_entropy_loss_and_gradient", logits, 16 << 10, 4, thread_bytes)
        kernel = _loss_and_gradient_kernel
        dlogits = torch.empty_like(logits)
        arguments += [upstream.contiguous(), dlogits]
    if rows:
        launcher.launch(
            kernel, (triton.cdiv(rows, config.rows),), *arguments, config=config, SMOOTHED=floor != 0.0,
            ROWS=config.rows, COLUMNS=config.columns, STAGES=config.num_stages, **_shape(logits),
        )  # fmt: skip
    return loss, log_sum_exp, dlogits


def _launch_gradient(
    logits: Tensor,
    target: Tensor,
    log_sum_exp: Tensor,
    dloss: Tensor,
    upstream: Tensor | None,
    out: Tensor,
    *words: float,  # vocab_start, num_valid, ignore_index, confidence, floor
) -> None:
    if logits.numel() == 0:
        return
    target, log_sum_exp, dloss = target.contiguous(), log_sum_exp.contiguous(), dloss.contiguous()
    upstream = None if upstream is None else upstream.contiguous()
    rows, columns = target.numel(), logits.shape[-1]
    config = _config("cross_entropy_gradient", logits, 8 << 10, 1)
    shape = _shape(logits)
    lanes = columns if columns % shape["GROUP"] == 0 else columns + shape["GROUP"]
    grid = (triton.cdiv(rows, config.rows) * triton.cdiv(lanes, config.columns),)
    launcher.launch(
        _gradient_kernel, grid, logits, target, log_sum_exp, dloss, upstream, out, rows, *words, config=config,
        MEND=upstream is not None, ROWS=config.rows, COLUMNS=config.columns, **shape,
    )  # fmt: skip


def cross_entropy_backward(logits: Tensor, target: Tensor, log_sum_exp: Tensor, dloss: Tensor, *words: float) -> Tensor:
    """dlogits like logits; ``words`` are vocab_start, num_valid, ignore_index, confidence, floor."""
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    _launch_gradient(logits, target, log_sum_exp, dloss, None, dlogits, *words)
    return dlogits


def cross_entropy_backward_(logits: Tensor, target: Tensor, log_sum_exp: Tensor, dloss: Tensor, *words: float) -> None:
    """dlogits in the place of logits, which are contiguous."""
    _launch_gradient(logits, target, log_sum_exp, dloss, None, logits, *words)


def cross_entropy_mend_(
    dlogits: Tensor, logits: Tensor, target: Tensor, log_sum_exp: Tensor, dloss: Tensor, upstream: Tensor, *words: float
) -> None:
    """Makes the rows of dlogits again whose ``dloss`` is not the ``upstream`` they were made for."""
    _launch_gradient(logits.contiguous(), target, log_sum_exp, dloss, upstream, dlogits, *words)
