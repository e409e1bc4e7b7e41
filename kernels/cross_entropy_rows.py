"""Device functions of ``cross_entropy.py``: where the elements of a row lie, what is counted and what is made of them.

A row need not start on 16 bytes. It is moved in the aligned groups of 16 bytes that lie wholly inside it; what is left
at its two ends, less than a group each, is moved element by element.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _groups(first, V: tl.constexpr, GROUP: tl.constexpr):
    """Where rows [R] begin in their first aligned group, and the lanes, counted from the start of that group, at which
    their whole groups begin and end."""
    shift = tl.cast(first % GROUP, tl.int32)
    begin = (shift + (GROUP - 1)) // GROUP * GROUP
    end = (shift + V) // GROUP * GROUP
    return shift, begin, tl.maximum(begin, end)


@triton.jit
def row_tile(start, here, first, V: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Offset, column and mask [R, C] of the lanes from ``start`` on, whole groups only; rows [R] that are ``here``."""
    lane = start + tl.arange(0, COLUMNS)
    if V % GROUP == 0:
        offset, column = first[:, None] + lane[None, :], lane[None, :]
        mask = here[:, None] & (lane < V)[None, :]
    else:  # not two returns: Triton compiles what follows the first, and the columns differ in shape
        shift, begin, end = _groups(first, V, GROUP)
        offset, column = (first // GROUP * GROUP)[:, None] + lane[None, :], lane[None, :] - shift[:, None]
        mask = here[:, None] & (lane[None, :] >= begin[:, None]) & (lane[None, :] < end[:, None])
    return offset, column, mask


@triton.jit
def row_ends(here, first, V: tl.constexpr, GROUP: tl.constexpr):
    """Offset, column and mask [R, 2 GROUP] of what ``row_tile`` leaves out of a row, before its groups and after."""
    shift, begin, end = _groups(first, V, GROUP)
    lane = tl.arange(0, 2 * GROUP)[None, :]
    column = tl.where(lane < GROUP, lane, (end - shift)[:, None] + lane - GROUP)
    mask = here[:, None] & (column < V) & ((lane >= GROUP) | (column < (begin - shift)[:, None]))
    return first[:, None] + column, column, mask


@triton.jit
def row_statistics(
    logits,
    here,
    first,
    num_valid,
    V: tl.constexpr,
    GROUP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maximum, Σ exp(logit - maximum) and Σ logit of rows [R]; one exponential a logit and one a group of them."""
    lanes: tl.constexpr = COLUMNS // GROUP
    highest = tl.full([ROWS, lanes], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, lanes], tl.float32)
    plain = tl.zeros([ROWS, lanes], tl.float32)
    at = 0  # is ``start``, but what follows from it is not carried through the stages of the loads
    for start in tl.range(0, num_valid if V % GROUP == 0 else num_valid + GROUP, COLUMNS, num_stages=STAGES):
        offset, _, mask = row_tile(start, here, first, V, GROUP, COLUMNS)
        value = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
        _, column, mask = row_tile(at, here, first, V, GROUP, COLUMNS)
        counted = column < num_valid  # rows that are not here are not written
        if V % GROUP != 0:
            counted = counted & mask
        at += COLUMNS
        if SMOOTHED:
            plain += tl.sum(tl.reshape(tl.where(counted, value, 0.0), (ROWS, lanes, GROUP)), axis=2)
        value = tl.reshape(tl.where(counted, value, float("-inf")), (ROWS, lanes, GROUP))
        higher = tl.maximum(highest, tl.max(value, axis=2))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.sum(tl.exp2(value * _LOG2_E - (level * _LOG2_E)[:, :, None]), axis=2)
        total = total * tl.exp2((highest - level) * _LOG2_E) + weight
        highest = higher
    top = tl.max(highest, axis=1)
    summed = tl.sum(plain, axis=1)
    if V % GROUP == 0:
        level = tl.where(top == float("-inf"), 0.0, top)
        return top, tl.sum(total * tl.exp2((highest - level[:, None]) * _LOG2_E), axis=1), summed
    offset, column, mask = row_ends(here, first, V, GROUP)
    value = tl.load(logits + offset, mask=mask, other=0.0).to(tl.float32)
    counted = mask & (column < num_valid)
    summed += tl.sum(tl.where(counted, value, 0.0), axis=1)
    value = tl.where(counted, value, float("-inf"))
    top = tl.maximum(top, tl.max(value, axis=1))
    level = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.exp2((value - level[:, None]) * _LOG2_E), axis=1)
    return top, tl.sum(total * tl.exp2((highest - level[:, None]) * _LOG2_E), axis=1) + weight, summed


@triton.jit
def target_logit(logits, here, first, local_target, num_valid):
    """[R] fp32; -inf where the target is none of this rank's words."""
    found = here & (local_target >= 0) & (local_target < num_valid)
    return tl.load(logits + first + local_target, mask=found, other=float("-inf")).to(tl.float32)


@triton.jit
def gradient_of(value, column, log_sum_exp, dloss, local_target, num_valid, ignored, confidence, floor):
    """dlogits [R, C] fp32 of logits [R, C]; ``ignored`` [R] are the rows without a loss."""
    word = tl.where((local_target >= 0) & (local_target < num_valid), local_target, -1).to(tl.int32)
    valid = tl.where(ignored, 0, num_valid)
    difference = tl.exp2(value * _LOG2_E - (log_sum_exp * _LOG2_E)[:, None])
    # The one-hot is subtracted in fp32, before the single rounding to the logits' dtype. Zero is selected before the
    # last product: behind it the selection would be made after the rounding, and cost an instruction more.
    difference = difference - floor - tl.where(column == word[:, None], confidence, 0.0)
    return tl.where(column < valid[:, None], difference, 0.0) * tl.where(ignored, 0.0, dloss)[:, None]
