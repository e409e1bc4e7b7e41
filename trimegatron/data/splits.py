"""Which sequences train, which validate, which test: today's Megatron's rule for ``--split``.

The weights are normalised to sum 1 and added up in order in float64; boundary k is round(n · sum of the first k),
half to even. A split of weight 0 does not exist.
"""

from __future__ import annotations

from trimegatron.config.split import parse_split

SPLITS = ("train", "valid", "test")
Range = tuple[int, int]


def split_ranges(split: str, num_sequences: int) -> tuple[Range | None, Range | None, Range | None]:
    """The range [lo, hi) of sequences of each split, None where its weight is 0. A range may be empty.

    Raises:
        ConfigError: ``split`` is not one to three numbers from 0 up, or all are 0.
    """
    weights = parse_split(split)
    total = sum(weights)
    bounds, cumulative = [0], 0.0
    for weight in weights:
        cumulative += weight / total
        bounds.append(round(cumulative * num_sequences))
    train, valid, test = ((bounds[k], bounds[k + 1]) if weights[k] > 0 else None for k in range(3))
    return train, valid, test
