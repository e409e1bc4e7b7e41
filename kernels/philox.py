"""Dropout masks as a pure function of (seed, sample, position, column, layer, head, site); no state, no stored mask.

The generator is Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with 7 rounds::

    key     = (seed, high word of the sample number)
    counter = (column group, position, low word of the sample number, site << 28 | layer << 14 | head)

One call gives four 32-bit words, that is eight 16-bit draws. An element is dropped when its draw is below
``dropout_threshold(p)`` = round(65536 p); what is kept is multiplied by 65536 / (65536 - threshold), so that the
expectation is exact. All coordinates are the global ones, whatever the cut into micro-batches and ranks.

Which draw belongs to which column is fixed here, for every backend:

* hidden dropout, tensors [s, b, h]:          column = 8 group + 2 word + half        (half 0: the low 16 bits)
* attention dropout, tensors [b, n, sq, sk]:  column = 32 g + 8 word + 2 t + half     with group = 4 g + t

In the second, the eight draws of a call are what one thread holds of a row of a matrix unit's accumulator, so a fused
attention kernel needs no exchange between threads. Position is the query's index there, column the key's.

This file holds the mapping and its eager form; ``philox_triton.py`` holds the same for Triton.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

ROUNDS = 7
DRAWS = 1 << 16  # a draw is one of this many values
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF
MAX_LAYERS = MAX_HEADS = 1 << 14

# Counters worked on at a time: the dozen int64 temporaries of a round then stay in a core's cache.
_CHUNK = 1 << 15


class Site(IntEnum):
    """The place in the model where a mask is applied."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


def dropout_threshold(p: float) -> int:
    """Number of the 65536 draws that mean "dropped". Raises ValueError unless 0 <= p < 1 (after rounding too)."""
    threshold = round(p * DRAWS) if 0.0 <= p < 1.0 else DRAWS
    if threshold >= DRAWS:
        raise ValueError(f"p ({p}) must be in [0, 1) after rounding to a multiple of 1/{DRAWS}. Choose a smaller p.")
    return threshold


def dropout_scale(p: float) -> float:
    """What kept values are multiplied by."""
    return DRAWS / (DRAWS - dropout_threshold(p))


def stream(site: int, layer: int, head: int = 0) -> int:
    """The fourth counter word. Raises ValueError when a field does not fit."""
    if not (0 <= site < 16 and 0 <= layer < MAX_LAYERS and 0 <= head < MAX_HEADS):
        raise ValueError(
            f"site ({site}), layer ({layer}) and head ({head}) must be within [0, 16), [0, {MAX_LAYERS}) and "
            f"[0, {MAX_HEADS}). Dropout has no mask outside them."
        )
    return site << 28 | layer << 14 | head


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor | int, Tensor | int], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of values in [0, 2**32) that broadcast against each other. Narrow shapes pay: the
            first two rounds then work on them before everything has the full shape.
        key: two words, int64 tensors or Python ints.
        rounds: 7 here; the published vectors are for 7 and 10.
    Returns:
        four int64 tensors of values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap modulo 2**64, so the low and (after the mask) high words are those of the true product.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ (c1 ^ k0)) & WORD
        c2 = ((product0 >> 32) ^ (c3 ^ k1)) & WORD
        c1, c3 = product1, product0  # bits above 32 are cleared where the next round masks
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1 & WORD, c2, c3 & WORD


def _keep_rows(
    columns: int, attention: bool, position: Tensor, sample: Tensor, last: Tensor, seed: int, p: float, rounds: int
) -> Tensor:
    """Mask [rows, columns] in one of the two mappings; ``position``, ``sample`` and ``last`` (the fourth counter word)
    are int64 [rows]."""
    span = 32 if attention else 8  # columns after which the mapping repeats
    blocks = -(-columns // span)
    group = torch.arange(blocks * span // 8, device=position.device)
    threshold = dropout_threshold(p)
    keep = torch.empty(len(position), blocks * span, dtype=torch.bool, device=position.device)
    step = max(1, _CHUNK // max(1, len(group)))
    for start in range(0, len(position), step):
        part = slice(start, start + step)
        row_sample = sample[part, None]
        counter = (group, position[part, None], row_sample & WORD, last[part, None])
        words = philox4x32(counter, (seed, (row_sample >> 32) & WORD), rounds)
        # torch compares signed 16-bit numbers only: flip the top bit of both halves, and of the threshold.
        flipped = [(word ^ 0x80008000).to(torch.int32) for word in words]
        if attention:  # [rows, g, t] each -> [rows, g, word, t]
            ordered = torch.stack([word.unflatten(-1, (blocks, 4)) for word in flipped], dim=-2)
        else:  # [rows, group] each -> [rows, group, word]
            ordered = torch.stack(flipped, dim=-1)
        # The halves of a word follow each other in memory, the low one first (little-endian).
        keep[part] = ordered.view(torch.int16).view(-1, blocks * span) >= threshold - DRAWS // 2
    return keep[:, :columns]


def hidden_keep_mask(
    shape: tuple[int, ...],
    sample_numbers: Tensor,
    *,
    p: float,
    seed: int,
    site: int,
    layer: int,
    position_offset: int = 0,
    rounds: int = ROUNDS,
) -> Tensor:
    """Mask of a tensor [s, b, h]: bool, True = kept. ``sample_numbers`` is int64 [b]; ``position_offset`` is the global
    position of row 0."""
    s, b, h = shape
    device = sample_numbers.device
    position = torch.arange(position_offset, position_offset + s, device=device).repeat_interleave(b)
    last = torch.full_like(position, stream(site, layer))
    return _keep_rows(h, False, position, sample_numbers.repeat(s), last, seed, p, rounds).view(s, b, h)


def attention_keep_mask(
    shape: tuple[int, ...],
    sample_numbers: Tensor,
    *,
    p: float,
    seed: int,
    layer: int,
    head_offset: int = 0,
    position_offset: int = 0,
    rounds: int = ROUNDS,
) -> Tensor:
    """Mask of attention probabilities [b, n, sq, sk]: bool, True = kept. The offsets are the global head of head 0 and
    the global position of query 0."""
    b, n, sq, sk = shape
    device = sample_numbers.device
    stream(Site.ATTENTION, layer, head_offset + max(0, n - 1))  # the last head must fit too
    position = torch.arange(position_offset, position_offset + sq, device=device).repeat(b * n)
    first = stream(Site.ATTENTION, layer, head_offset)
    last = torch.arange(first, first + n, device=device).repeat_interleave(sq).repeat(b)
    sample = sample_numbers.repeat_interleave(n * sq)
    return _keep_rows(sk, True, position, sample, last, seed, p, rounds).view(b, n, sq, sk)
