"""Philox in eager form: published vectors, the two mappings element by element, statistics with a negative control."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from trimegatron.kernels import philox

ONES = 0xFFFFFFFF
PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)

# Random123's kat_vectors, philox4x32.
VECTORS = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, (ONES, ONES), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI_COUNTER, PI_KEY, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def words(counter: tuple[int, ...], key: tuple[int, int], rounds: int = philox.ROUNDS) -> list[int]:
    """The definition in Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return [c0, c1, c2, c3]


@pytest.mark.parametrize("rounds,counter,key,expected", VECTORS)
def test_known_answers(rounds: int, counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    tensors = tuple(torch.tensor(c) for c in counter)
    result = philox.philox4x32(tensors, key, rounds)  # type: ignore[arg-type]
    assert tuple(int(word) for word in result) == expected
    assert tuple(words(counter, key, rounds)) == expected


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_hidden_mapping(p: float) -> None:
    """column = 8 group + 2 word + half; counter = (group, position, low sample, site << 28 | layer << 14)."""
    samples, seed, offset = [3, (7 << 32) + 0xFFFFFFFE], 0xDEADBEEF, 50
    mask = {"p": p, "seed": seed, "site": philox.Site.MLP_OUTPUT, "layer": 9, "position_offset": offset}
    keep = philox.hidden_keep_mask((4, 2, 21), torch.tensor(samples), **mask)
    assert keep.shape == (4, 2, 21)
    for s in range(4):
        for b, sample in enumerate(samples):
            for column in range(21):
                counter = (column // 8, s + offset, sample & ONES, 3 << 28 | 9 << 14)
                word = words(counter, (seed, sample >> 32))[column % 8 // 2]
                draw = word >> 16 if column % 2 else word & 0xFFFF
                assert bool(keep[s, b, column]) == (draw >= round(65536 * p))


def test_attention_mapping() -> None:
    """column = 32 g + 8 word + 2 t + half with group 4 g + t; the head and the site are in the last word."""
    samples, seed, head_offset, offset = [3, 7 << 32], 11, 5, 60
    mask = {"p": 0.3, "seed": seed, "layer": 16383, "head_offset": head_offset, "position_offset": offset}
    keep = philox.attention_keep_mask((2, 2, 3, 70), torch.tensor(samples), **mask)
    for b, sample in enumerate(samples):
        for n in range(2):
            for q in range(3):
                for column in range(70):
                    g, j, t, e = column // 32, column % 32 // 8, column % 8 // 2, column % 2
                    counter = (4 * g + t, q + offset, sample & ONES, 1 << 28 | 16383 << 14 | (head_offset + n))
                    word = words(counter, (seed, sample >> 32))[j]
                    draw = word >> 16 if e else word & 0xFFFF
                    assert bool(keep[b, n, q, column]) == (draw >= round(65536 * 0.3))


def scores(rounds: int) -> dict[str, float]:
    """Standard scores of the rate and of the correlations between neighbours along every coordinate of a mask."""
    mask = {"p": 0.1, "seed": 1234, "site": 2, "layer": 3, "rounds": rounds}
    dropped = ~philox.hidden_keep_mask((256, 16, 768), torch.arange(16), **mask)
    p = philox.dropout_threshold(0.1) / 65536
    z = (dropped.float() - p) / math.sqrt(p * (1 - p))

    def score(x: Tensor) -> float:
        return x.sum(dtype=torch.float64).item() / math.sqrt(x.numel())

    result = {"rate": score(z)}
    for dim, name, lags in ((0, "position", (1, 2, 8)), (1, "sample", (1, 2, 8)), (2, "column", (1, 2, 8, 64))):
        for lag in lags:
            length = z.shape[dim] - lag
            result[f"{name} {lag}"] = score(z.narrow(dim, 0, length) * z.narrow(dim, lag, length))
    return result


def test_masks_are_independent_with_seven_rounds_and_the_test_would_see_five() -> None:
    assert {name: z for name, z in scores(philox.ROUNDS).items() if abs(z) > 4} == {}
    assert abs(scores(5)["position 1"]) > 50


def test_expectation_is_exact() -> None:
    for p in (0.0, 0.1, 1 / 3, 0.999):
        kept = 1 - philox.dropout_threshold(p) / 65536
        assert math.isclose(kept * philox.dropout_scale(p), 1.0)


@pytest.mark.parametrize("p", [-0.1, 1.0, 0.999999, float("nan")])
def test_impossible_probabilities_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"p \("):
        philox.dropout_threshold(p)


@pytest.mark.parametrize("field", [(16, 0, 0), (0, 1 << 14, 0), (0, 0, 1 << 14), (0, -1, 0)])
def test_coordinates_that_do_not_fit_are_refused(field: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be within"):
        philox.stream(*field)


def test_the_last_head_must_fit() -> None:
    mask = {"p": 0.1, "seed": 1, "layer": 0, "head_offset": (1 << 14) - 1}
    with pytest.raises(ValueError, match="must be within"):
        philox.attention_keep_mask((1, 2, 1, 1), torch.tensor([0]), **mask)
