"""How results grow: those that differ in one number only, and the slope of the line through them in log-log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trimegatron.bench.labels import label, telling_parameters
from trimegatron.bench.results import Parameter, Result

MIN_POINTS = 3
UNEXPLAINED = 0.1
"""Of the variance of the logarithms."""
MIN_FACTOR = 10
"""Between the smallest and the largest: a slope over less says little."""


@dataclass(frozen=True)
class Growth:
    """One figure of one variant in one case, over one parameter."""

    dimension: str
    """The parameter's name."""
    results: list[Result]
    """Ascending in it; all else is the same."""

    @property
    def first(self) -> Result:
        return self.results[0]

    @property
    def fixed(self) -> dict[str, Parameter]:
        """The other parameters."""
        return {name: value for name, value in self.first.parameters.items() if name != self.dimension}

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(parameter, median)."""
        return tuple((float(result.parameters[self.dimension]), result.median) for result in self.results)

    @property
    def slope(self) -> float:
        """The exponent k of value ∝ parameter^k, by least squares of the logarithms."""
        return statistics.linear_regression(*self._logarithms).slope

    @property
    def is_power(self) -> bool:
        """Whether a line fits: a constant is one, and what the slope explains but for ``UNEXPLAINED``."""
        return self.is_constant or statistics.correlation(*self._logarithms) ** 2 > 1 - UNEXPLAINED

    @property
    def is_constant(self) -> bool:
        values = [value for _, value in self.points]
        return max(values) <= 1.05 * min(values)

    @property
    def _logarithms(self) -> tuple[list[float], list[float]]:
        return [math.log(x) for x, _ in self.points], [math.log(y) for _, y in self.points]


def growths(results: Iterable[Result]) -> list[Growth]:
    """Every one of at least ``MIN_POINTS`` points over a factor of ``MIN_FACTOR``; values of 0 have no logarithm."""
    series: dict[tuple[str, Any], dict[float, Result]] = {}
    for result in results:
        for dimension, value in result.parameters.items():
            if isinstance(value, bool | str) or value <= 0 or result.median <= 0:
                continue
            fixed = {name: other for name, other in result.parameters.items() if name != dimension}
            key = dimension, replace(result, parameters=fixed).identity
            series.setdefault(key, {})[value] = result
    return [
        Growth(dimension, [points[value] for value in sorted(points)])
        for (dimension, _), points in series.items()
        if len(points) >= MIN_POINTS and max(points) >= MIN_FACTOR * min(points)
    ]


def describe_growth(results: Iterable[Result]) -> Iterator[str]:
    """A line for each that grows or falls by a power, and one for all others."""
    found = growths(results)
    told = [growth for growth in found if growth.is_power and not growth.is_constant]
    names = telling_parameters([replace(growth.first, parameters=growth.fixed) for growth in found])
    for g in told:
        what = label(f"{g.first.case}, {g.first.variant}, {g.first.figure}", g.fixed, names)
        yield f"{what} ∝ {g.dimension}^{g.slope:.2f} from {g.points[0][0]:,.12g} to {g.points[-1][0]:,.12g}"
    if len(told) < len(found):
        yield describe_others(found)


def describe_others(found: Sequence[Growth]) -> str:
    """Those whose slope says nothing."""
    constant = sum(growth.is_constant for growth in found)
    others = sum(not growth.is_power for growth in found)
    return f"{constant} of {len(found)} series do not change, {others} follow no power of what was swept"
