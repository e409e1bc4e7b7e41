"""How results grow: those that differ in one number only, and the slope of the line through them in log-log."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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
    """A line for each that is a power."""
    found = growths(results)
    for g in found:
        if g.is_power:
            fixed = ", ".join(f"{name} {value}" for name, value in g.fixed.items())
            (first, _), (last, _) = g.points[0], g.points[-1]
            what = f"{g.first.case}, {g.first.variant}, {g.first.figure}"
            grows = f"∝ {g.dimension}^{g.slope:.2f} from {first:,.12g} to {last:,.12g}"
            yield f"{what} {grows}" + (f" ({fixed})" if fixed else "")
    others = sum(not g.is_power for g in found)
    if others:
        yield f"{others} more series follow no power of what was swept"
