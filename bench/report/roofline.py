"""The roofline: arithmetic in a second over arithmetic for each byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimegatron.bench.report.blocks import Line, Plot, Section
from trimegatron.bench.report.comparison import Found, Key
from trimegatron.bench.results import Result
from trimegatron.bench.show import show_machine

BANDWIDTH, RATE = ("bandwidth", "GB/s"), ("matrix rate", "TFLOP/s")
"""Figure and unit of the two roofs: the largest of each machine."""


def roofline(found: Mapping[Key, Found]) -> Section:
    """A plot for each machine that has both roofs, with all whose arithmetic and bytes are known."""
    section = Section("Roofline")
    machines: dict[str, list[Result]] = {}
    for result, run in found.values():
        machines.setdefault(show_machine(run.machine), []).append(result)
    for machine, results in machines.items():
        roofs = [[r.median for r in results if (r.figure, r.unit) == roof] for roof in (BANDWIDTH, RATE)]
        points = [r for r in results if r.unit in ("s", RATE[1]) and {"flops", "bytes"} <= r.parameters.keys()]
        if points and all(roofs):
            section.blocks.append(roofline_plot(machine, points, *map(max, roofs)))
    if not section.blocks:
        section.lines = [
            "Left out: no machine has a bandwidth, a matrix rate, and something of which the arithmetic, the bytes and "
            "the time of one call are known. A check of a GPU has them."
        ]
    return section


def roofline_plot(machine: str, points: Sequence[Result], bandwidth: float, rate: float) -> Plot:
    """TFLOP/s over FLOP a byte; the roof is the smaller of the two limits."""
    placed = []
    for r in points:
        flops = float(r.parameters["flops"])
        reached = flops / r.median / 1e12 if r.unit == "s" else r.median
        placed.append((r, flops / float(r.parameters["bytes"]), reached))
    knee = 1e3 * rate / bandwidth
    left = min(knee, *(x for _, x, _ in placed)) / 2
    right = 2 * max(knee, *(x for _, x, _ in placed))
    roof = ((left, left * bandwidth / 1e3), (knee, rate), (right, rate))
    lines = [Line("roof", roof, f"{bandwidth:,.0f} GB/s, {rate:,.0f} TFLOP/s")]
    lines += [Line(f"{r.variant}, {r.case}", ((x, y),), f"{y:.3g} TFLOP/s") for r, x, y in placed]
    return Plot(machine, "FLOP a byte", "TFLOP/s", lines)
