"""How results grow: those that differ in one number only, and the slope of the line through them in log-log."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trimegatron.bench.results import Parameter, Result

MIN_POINTS = 3
MIN_FACTOR = 10
"""Between the smallest and the largest: a slope over less says little."""


@dataclass(frozen=True)
class Growth:
    """One figure of one variant in one case, over one parameter."""

    case: str
    variant: str
    figure: str
    unit: str
    dimension: str
    fixed: tuple[tuple[str, Parameter], ...]
    """The other parameters."""
    points: tuple[tuple[float, float], ...] = ()
    """(parameter, median), ascending."""

    @property
    def slope(self) -> float:
        """The exponent k of value ∝ parameter^k, by least squares of the logarithms."""
        xs, ys = ([math.log(value) for value in axis] for axis in zip(*self.points, strict=True))
        return statistics.linear_regression(xs, ys).slope


def growths(results: Iterable[Result]) -> list[Growth]:
    """Every one of at least ``MIN_POINTS`` points over a factor of ``MIN_FACTOR``; values of 0 have no logarithm."""
    series: dict[Growth, dict[float, float]] = {}
    for result in results:
        for dimension, value in result.parameters.items():
            if isinstance(value, bool | str) or value <= 0 or result.median <= 0:
                continue
            fixed = tuple(sorted((k, v) for k, v in result.parameters.items() if k != dimension))
            growth = Growth(result.case, result.variant, result.figure, result.unit, dimension, fixed)
            series.setdefault(growth, {})[value] = result.median
    return [
        dataclasses.replace(growth, points=tuple(sorted(points.items())))
        for growth, points in series.items()
        if len(points) >= MIN_POINTS and max(points) >= MIN_FACTOR * min(points)
    ]


def describe_growth(results: Iterable[Result]) -> Iterator[str]:
    """A line for each."""
    for g in growths(results):
        fixed = ", ".join(f"{name} {value}" for name, value in g.fixed)
        (first, _), (last, _) = g.points[0], g.points[-1]
        yield (
            f"{g.case}, {g.variant}, {g.figure} ∝ {g.dimension}^{g.slope:.2f} from {first:,g} to {last:,g}"
            + (f" ({fixed})" if fixed else "")
        )
