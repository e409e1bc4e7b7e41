"""What results have in common, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trimegatron.bench.results import Parameter, Result
from trimegatron.bench.show import show_parameters

Benchmarks = dict[str, list[Result]]
"""The results of each benchmark."""


def shared_parameters(results: Sequence[Result]) -> dict[str, Parameter]:
    """What is the same in all."""
    first = results[0].parameters if results else {}
    return {
        name: value for name, value in first.items() if all(result.parameters.get(name) == value for result in results)
    }


def telling_parameters(results: Sequence[Result], *, but: str = "") -> list[str]:
    """The names of parameters that tell results apart, where their cases and ``but`` do not: what follows from others,
    such as the bytes of a shape, tells nothing."""

    def count(names: Sequence[str]) -> int:
        return len({(r.case, r.parameters.get(but), *(r.parameters.get(name) for name in names)) for r in results})

    names = [name for name in dict.fromkeys(name for r in results for name in r.parameters) if name != but]
    everything = count(names)
    for name in reversed(names):
        rest = [other for other in names if other != name]
        if count(rest) == everything:
            names = rest
    return names


def label(case: str, parameters: Mapping[str, Parameter], names: Iterable[str]) -> str:
    """The case, with those of its parameters that matter."""
    chosen = {name: parameters[name] for name in names if name in parameters}
    return f"{case} · {show_parameters(chosen)}" if chosen else case


def kind_of(results: Iterable[Result]) -> str:
    kinds = {result.measured for result in results}
    return "Measured and counted." if len(kinds) == 2 else "Measured." if kinds == {True} else "Counted."
