"""A plot as inline SVG: both axes logarithmic, joined points for each line, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from trimegatron.bench.report.blocks import Line, Plot

WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 10, 38
COLOURS = ("#0b62c4", "#c2571a", "#5b8c2a", "#8b4fb3", "#7a7a7a", "#b8860b", "#167d7f", "#c23b6b")
"""The first is ours."""
LEAST_DECADES = 0.8
"""An axis spans at least so much, so that noise does not look like growth."""


def colours(lines: Sequence[Line]) -> list[str]:
    """One for each line; ours has the first."""
    others = iter(COLOURS[1:] * len(lines))
    return [COLOURS[0] if line.is_ours else next(others) for line in lines]


def axis(values: Sequence[float]) -> tuple[float, float]:
    """The logarithms of an axis's ends."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.04 * (high - low), (LEAST_DECADES - (high - low)) / 2)
    return low - room, high + room


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """1, 2, 5 of each decade where they are few, else decades, each or every second."""
    decades = range(math.floor(low), math.ceil(high) + 1)
    for steps, stride in (((1, 2, 5), 1), ((1,), 1), ((1,), 2), ((1,), 3)):
        found = [step * 10.0**decade for decade in decades[::stride] for step in steps]
        found = [value for value in found if low <= math.log10(value) <= high]
        if len(found) <= most:
            return found
    return found


def short(value: float) -> str:
    """``20``, ``5k``, ``2M``, ``0.05``."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{prefix}"
    return f"{value:.3g}"


def svg(plot: Plot) -> str:
    """The plot, scaled to the width it is given."""
    points = [point for line in plot.lines for point in line.points]
    x_low, x_high = axis([x for x, _ in points])
    y_low, y_high = axis([y for _, y in points])

    def across(x: float) -> float:
        return LEFT + (math.log10(x) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (math.log10(y) - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(plot.title)}">']
    for value in ticks(x_low, x_high):
        x, foot = across(value), HEIGHT - BOTTOM
        parts.append(f'<path class="grid" d="M{x:.1f} {TOP}V{foot}"/>')
        parts.append(f'<text x="{x:.1f}" y="{foot + 15}" text-anchor="middle">{short(value)}</text>')
    for value in ticks(y_low, y_high):
        y = down(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(plot.x)}</text>')
    parts.append(
        f'<text transform="translate(12 {(HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(plot.y)}</text>"
    )
    for line, colour in reversed(list(zip(plot.lines, colours(plot.lines), strict=True))):  # ours on top
        parts.append(draw(line, colour, across, down))
    return "".join([*parts, "</svg>"])


def draw(line: Line, colour: str, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    """A line and its points."""
    places = [(across(x), down(y)) for x, y in line.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{colour}"/>' for x, y in places)
    dashes = "" if line.is_ours else ' stroke-dasharray="5 3"'
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>{dots}'
