"""Philox-4x32 and its two column mappings as Triton device functions; ``philox.py`` says what they compute."""

import triton
import triton.language as tl

from trimegatron.kernels import philox

_ROUNDS = tl.constexpr(philox.ROUNDS)
_M0, _M1 = tl.constexpr(philox.MULTIPLIERS[0]), tl.constexpr(philox.MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(philox.WEYL[0]), tl.constexpr(philox.WEYL[1])


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    """Four uint32 words for uint32 counters and keys, which broadcast: the first two rounds stay narrow."""
    for _ in tl.static_range(ROUNDS):
        high0, low0 = tl.umulhi(c0, tl.cast(_M0, tl.uint32)), c0 * tl.cast(_M0, tl.uint32)
        high1, low1 = tl.umulhi(c2, tl.cast(_M1, tl.uint32)), c2 * tl.cast(_M1, tl.uint32)
        c0 = high1 ^ (c1 ^ k0)
        c2 = high0 ^ (c3 ^ k1)
        c1 = low1
        c3 = low0
        k0 = k0 + tl.cast(_W0, tl.uint32)
        k1 = k1 + tl.cast(_W1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _draws(groups, position, sample, stream, seed):
    """The draws of counters [R, G] as [R, G, 2, 2, 2]: word (two bits, the high one first), half. Each lies in the
    upper half of a word, so that the high one needs no shift; below it may be another.

    ``groups`` is int [G]; ``position``, ``sample`` (int64) and ``stream`` are [R]; ``seed`` is a scalar.
    """
    low = tl.cast(sample & 0xFFFFFFFF, tl.uint32)
    high = tl.cast((sample >> 32) & 0xFFFFFFFF, tl.uint32)
    w0, w1, w2, w3 = philox4x32(
        tl.cast(groups, tl.uint32)[None, :],
        tl.cast(position, tl.uint32)[:, None],
        low[:, None],
        tl.cast(stream, tl.uint32)[:, None],
        tl.cast(seed, tl.uint32),
        high[:, None],
        _ROUNDS,
    )
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.join(words << 16, words)


@triton.jit
def hidden_keep(
    row, column_start, batch, sample_numbers, seed, stream, position_offset, threshold, R: tl.constexpr, C: tl.constexpr
):
    """Mask [R, C] of rows [R] (row = position b + sample) and C columns from ``column_start``, a multiple of 8."""
    sample = tl.load(sample_numbers + row % batch)
    groups = column_start // 8 + tl.arange(0, C // 8)
    draws = _draws(groups, row // batch + position_offset, sample, stream + tl.zeros_like(row), seed)
    return tl.reshape(draws, (R, C)) >= (tl.cast(threshold, tl.uint32) << 16)


@triton.jit
def attention_keep(
    query, column_start, sample, seed, stream, position_offset, threshold, R: tl.constexpr, C: tl.constexpr
):
    """Mask [R, C] of queries [R] (``stream`` [R] holds the head) and C keys from ``column_start``, a multiple of 32."""
    groups = column_start // 8 + tl.arange(0, C // 8)
    draws = _draws(groups, query + position_offset, sample, stream, seed)
    draws = tl.permute(tl.reshape(draws, (R, C // 32, 4, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(draws, (R, C)) >= (tl.cast(threshold, tl.uint32) << 16)


@triton.jit
def tile_keep(query, column_start, sample, seed, stream, threshold, R: tl.constexpr, C: tl.constexpr):
    """``attention_keep`` for queries [R] of one head of one sample: scalars, which keep the first rounds narrow, and
    draws compared at the top of a word, where the high half needs no shift.

    In the layout of a matrix unit's accumulator every thread computes the draws of what it holds.
    """
    words = philox4x32(
        tl.cast(column_start // 8 + tl.arange(0, C // 8), tl.uint32)[None, :],
        tl.cast(query, tl.uint32)[:, None],
        tl.cast(sample & 0xFFFFFFFF, tl.uint32),
        tl.cast(stream, tl.uint32),
        tl.cast(seed, tl.uint32),
        tl.cast((sample >> 32) & 0xFFFFFFFF, tl.uint32),
        _ROUNDS,
    )
    word = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    draws = tl.reshape(tl.join(word << 16, word), (R, C // 32, 4, 4, 2))
    return tl.reshape(tl.permute(draws, (0, 1, 3, 2, 4)), (R, C)) >= (tl.cast(threshold, tl.uint32) << 16)
