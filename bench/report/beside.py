"""Ours beside others: results that differ in their variant alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trimegatron.bench.growth import growths
from trimegatron.bench.labels import Benchmarks, kind_of, shared_parameters, telling_parameters
from trimegatron.bench.report.blocks import Bar, Bars, Section
from trimegatron.bench.results import OURS, Result
from trimegatron.bench.show import show_parameters, show_range


def beside_others(results: Sequence[Result], *, with_swept: bool) -> list[list[Result]]:
    """Results that differ in their variant alone, ours and others among them. What is swept is shown as growth."""
    swept = {result.identity for growth in growths(results) for result in growth.results}
    groups: dict[tuple, list[Result]] = {}
    for result in results:
        if with_swept or result.identity not in swept:
            groups.setdefault(replace(result, variant="").identity, []).append(result)
    return [group for group in groups.values() if {r.variant.startswith(OURS) for r in group} == {True, False}]


def side_by_side(benchmarks: Benchmarks) -> list[Section]:
    """One section for each benchmark that has ours and others."""
    made = []
    for benchmark, results in benchmarks.items():
        compared = beside_others(results, with_swept=False)
        if compared:
            firsts = [group[0] for group in compared]
            shared, names = shared_parameters(firsts), telling_parameters(firsts)
            about = kind_of(r for group in compared for r in group) + (f" {show_parameters(shared)}." if shared else "")
            section = Section(f"{benchmark}: ours beside others", [about])
            section.blocks += [bars(group, names) for group in compared]
            made.append(section)
    return made


def bars(group: Sequence[Result], names: Sequence[str]) -> Bars:
    """The variants of one case."""
    best = min if group[0].better == "lower" else max
    ours = best(r.median for r in group if r.variant.startswith(OURS))
    others = best(r.median for r in group if not r.variant.startswith(OURS))
    made = []
    for r in sorted(group, key=lambda r: not r.variant.startswith(OURS)):
        is_other = not r.variant.startswith(OURS) and ours
        made.append(Bar(r.variant, r.median, show_range(r), f"{r.median / ours:.2f} × ours" if is_other else ""))
    parameters = {name: value for name, value in group[0].parameters.items() if name in names}
    gain = gain_of(ours, others, group[0].better)
    return Bars(group[0].case, show_parameters(parameters), group[0].figure, made, gain)


def gain_of(ours: float, others: float, better: str) -> float:
    """How many times better ours is, below 1 where it is worse."""
    over, under = (others, ours) if better == "lower" else (ours, others)
    return over / under if under > 0 else 1.0 if over <= 0 else math.inf
