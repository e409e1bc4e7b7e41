"""How results grow with one parameter: a plot where there are several variants, and a table of all slopes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trimegatron.bench.growth import Growth, describe_others, growths
from trimegatron.bench.labels import Benchmarks, label, shared_parameters, telling_parameters
from trimegatron.bench.report.blocks import Line, Plot, Section, Shade, Table
from trimegatron.bench.show import show_parameters, show_value


def growth_sections(benchmarks: Benchmarks) -> list[Section]:
    """Plots where there are several variants, and all slopes in a table."""
    made = []
    for benchmark, results in benchmarks.items():
        found = growths(results)
        if not found:
            continue
        plots: dict[tuple, list[Growth]] = {}
        for growth in found:
            key = growth.dimension, replace(growth.first, variant="").identity
            plots.setdefault(key, []).append(growth)
        firsts = [replace(growth.first, parameters=growth.fixed) for growth in found]
        shared, names = shared_parameters(firsts), telling_parameters(firsts)
        section = Section(f"{benchmark}: growth", [f"{show_parameters(shared)}."] if shared else [])
        section.blocks += [
            plot(group, names)
            for group in plots.values()
            if len(group) > 1 and not all(growth.is_constant for growth in group)
        ]
        if section.blocks:
            section.lines.append("Both axes are logarithmic.")
        told = [growth for growth in found if growth.is_power and not growth.is_constant]
        if told:
            header = ["case", "slope", "over", "first → last", "figure"]
            title = f"{len(told)} slopes" if section.blocks else ""
            section.blocks.append(Table(header, [slope_row(growth, names) for growth in told], title))
        if len(told) < len(found):
            section.lines.append(f"{describe_others(found)}; the table of slopes has the others.")
        made.append(section)
    return made


def plot(group: Sequence[Growth], names: Sequence[str]) -> Plot:
    """The variants of one case over one parameter."""
    lines = [
        Line(g.first.variant, g.points, f"slope {g.slope:.2f}, at last {show_value(g.points[-1][1], g.first.unit)}")
        for g in group
    ]
    first = group[0].first
    title = label(first.case, group[0].fixed, names)
    return Plot(title, group[0].dimension.replace("_", " "), f"{first.figure}, {first.unit}", lines)


def slope_row(growth: Growth, names: Sequence[str]) -> list[str | Shade]:
    (first, low), (last, high) = growth.points[0], growth.points[-1]
    result = growth.first
    return [
        label(result.case, growth.fixed, names), f"{growth.slope:.2f}",
        f"{growth.dimension.replace('_', ' ')} {first:,.12g} to {last:,.12g}",
        f"{show_value(low, result.unit)} → {show_value(high, result.unit)}", f"{result.figure}, {result.variant}",
    ]  # fmt: skip
