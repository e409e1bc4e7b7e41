"""A small set of combinations in which every two choices meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Combination = dict[str, Any]


def covering_set(choices: dict[str, Sequence[Any]], is_valid: Callable[[Combination], bool]) -> list[Combination]:
    """Combinations of one choice each, such that every two choices that some valid combination has are together in
    one of these. Greedy: the next one is the first of those that bring the most new pairs, so the answer is always
    the same.
    """
    names = list(choices)
    candidates = [
        combination
        for values in itertools.product(*choices.values())
        if is_valid(combination := dict(zip(names, values, strict=True)))
    ]
    pairs = [frozenset(itertools.combinations(combination.items(), 2)) for combination in candidates]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(candidates)), key=lambda i: len(pairs[i] & missing))
        chosen.append(candidates[best])
        missing -= pairs[best]
    return chosen
