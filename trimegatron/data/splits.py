"""Which sequences train, which validate, which test: Megatron's rules for ``--split``.

2026: the weights are normalised to sum 1 and added up in order in float64; boundary k is round(n · sum of the first
k), half to even. A split of weight 0 does not exist.

2022: each split gets round(n · weight) sequences, half to even; what the sum of the three exceeds n by (it may be
negative) is taken from all three boundaries. The two differ for about a quarter of all n at 949,50,1.
"""

from __future__ import annotations

import itertools

from trimegatron.config.split import parse_split

SPLITS = ("train", "valid", "test")
Range = tuple[int, int]


def split_ranges(split: str, num_sequences: int, compat: int = 2026) -> tuple[Range | None, Range | None, Range | None]:
    """The range [lo, hi) of sequences of each split, None where its weight is 0. A range may be empty.

    Raises:
        ConfigError: ``split`` is not one to three numbers from 0 up, or all are 0.
    """
    weights = parse_split(split, compat)
    bounds = (_bounds_2022 if compat == 2022 else _bounds_2026)(weights, num_sequences)
    ranges = itertools.pairwise([0, *(min(max(bound, 0), num_sequences) for bound in bounds)])
    train, valid, test = (r if weight > 0 else None for weight, r in zip(weights, ranges, strict=True))
    return train, valid, test


def _bounds_2026(weights: tuple[float, ...], n: int) -> list[int]:
    total, cumulative, bounds = sum(weights), 0.0, []
    for weight in weights:
        cumulative += weight / total
        bounds.append(round(cumulative * n))
    return bounds


def _bounds_2022(weights: tuple[float, ...], n: int) -> list[int]:
    total = sum(weights)
    bounds = list(itertools.accumulate(round(weight / total * n) for weight in weights))
    return [bound - (bounds[-1] - n) for bound in bounds]
