"""``--data-path``: one set of token files, or several to be blended."""

from __future__ import annotations

import math
from typing import NamedTuple

from trimegatron.config.options import fail

ADVICE = "Write PREFIX, or WEIGHT PREFIX WEIGHT PREFIX …, or PREFIX PREFIX … to draw from each by its size."


class Blend(NamedTuple):
    """Prefixes of ``.bin``/``.idx`` pairs and what share of the samples comes from each."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None
    """As given, not normalised; None where the sets' sizes decide."""

    @property
    def used(self) -> tuple[str, ...]:
        """The prefixes that are read: those of weight 0 are not."""
        return tuple(p for k, p in enumerate(self.prefixes) if self.weights is None or self.weights[k] > 0)


def parse_blend(values: list[str], name: str = "data_path") -> Blend:
    """Megatron-LM's reading: one value is a prefix; of several, those at the odd places are weights if all of them are
    numbers, else all are prefixes.

    Args:
        values: the words after the option, at least one.
        name: the option, for the message.

    Raises:
        ConfigError: a weight without a prefix, a wrong weight, or a sum of 0.
    """
    if len(values) == 1:
        return Blend((values[0],), None)
    first = [_number(value) for value in values[::2]]
    if None in first:
        if first[0] is not None:
            wrong = next(value for value, number in zip(values[::2], first, strict=True) if number is None)
            fail(
                name, " ".join(values), "mixes weights and bare prefixes", f"{wrong!r} is where a weight is due", ADVICE
            )
        return Blend(tuple(values), None)
    if len(values) % 2:
        fail(name, " ".join(values), "must end with a prefix", f"the weight {values[-1]} has none", ADVICE)
    weights = tuple(number for number in first if number is not None)
    for weight in weights:
        if not 0 <= weight < math.inf:
            fail(name, " ".join(values), "must have weights of at least 0", f"got {weight:g}", ADVICE)
    if not sum(weights) > 0:
        fail(name, " ".join(values), "must have weights with a sum above 0", way_out=ADVICE)
    return Blend(tuple(values[1::2]), weights)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
