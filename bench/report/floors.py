"""How near results are to the best there can be."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trimegatron.bench.growth import growths
from trimegatron.bench.labels import Benchmarks, kind_of, label, shared_parameters, telling_parameters
from trimegatron.bench.report.blocks import Section, Shade, Table
from trimegatron.bench.results import Parameter, Result
from trimegatron.bench.show import show_parameter, show_parameters

MOST_COLUMNS = 8


def floor_shares(benchmarks: Benchmarks) -> list[Section]:
    """A table for each figure that has a floor: cases down, sizes across."""
    made = []
    for benchmark, results in benchmarks.items():
        for figure, unit in dict.fromkeys((r.figure, r.unit) for r in results if r.floor):
            mine = [r for r in results if r.floor and (r.figure, r.unit) == (figure, unit)]
            variants = list(dict.fromkeys(r.variant for r in mine))
            across = column_parameter(mine)
            other = swept_otherwise(mine, across)
            mine = [r for r in mine if r.identity not in other]
            shared, down = shared_parameters(mine), telling_parameters(mine, but=across)
            cells: dict[str, dict[str, Result]] = {}
            for r in sorted(mine, key=lambda r: order(r.parameters.get(across, ""))):
                name = label(r.case, r.parameters, down) + (f", {r.variant}" if len(variants) > 1 else "")
                cells.setdefault(name, {})[show_parameter(r.parameters.get(across, ""))] = r
            columns = list(dict.fromkeys(column for row in cells.values() for column in row))
            rows: list[list[str | Shade]] = [
                [row, *(shade(found[column]) if column in found else "" for column in columns)]
                for row, found in cells.items()
            ]
            heads = [f"{across.replace('_', ' ')} {column}" for column in columns] if across else [figure]
            about = f"{kind_of(mine)} {' and '.join(variants)}; 100 % is the best there can be."
            about += f" {show_parameters(shared)}." if shared else ""
            section = Section(f"{benchmark}: {figure}, share of the best there can be", [about])
            section.blocks.append(Table(["", *heads], rows))
            made.append(section)
    return made


def column_parameter(results: Sequence[Result]) -> str:
    """The parameter that makes the fewest rows when its values are the columns; nothing where none saves any."""
    names = telling_parameters(results)
    rows = {"": len({label(r.case, r.parameters, names) for r in results})}
    for name in names:
        if len({r.parameters.get(name) for r in results}) <= MOST_COLUMNS:
            rows[name] = len({label(r.case, r.parameters, [n for n in names if n != name]) for r in results})
    return min(rows, key=lambda name: rows[name])


def order(value: Parameter) -> tuple[bool, float, str]:
    """Numbers by size, then texts."""
    return isinstance(value, str), 0.0 if isinstance(value, str) else float(value), str(value)


def swept_otherwise(results: Sequence[Result], across: str) -> set[tuple]:
    """Points of a growth over another parameter alone, which would each take a line of their own."""
    found = growths(results)
    here = {result.identity for growth in found if growth.dimension == across for result in growth.results}
    return {result.identity for growth in found for result in growth.results} - here


def shade(result: Result) -> Shade:
    share = share_of_floor(result)
    return Shade(share, f"{share:.1%}")


def share_of_floor(result: Result) -> float:
    """1 where the result is as good as can be."""
    assert result.floor
    if result.better == "higher":
        return result.median / result.floor
    return result.floor / result.median if result.median else math.inf
