"""What results have in common, and what tells them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trimegatron.bench.results import Parameter, Result
from trimegatron.bench.show import show_parameters

Benchmarks = dict[str, list[Result]]
"""The results of each benchmark."""


def split_parameters(all_parameters: Sequence[Mapping[str, Parameter]]) -> tuple[dict[str, Parameter], list[str]]:
    """What is the same in all, and the names of what is not, in order."""
    names = list(dict.fromkeys(name for parameters in all_parameters for name in parameters))
    shared = {
        name: all_parameters[0][name]
        for name in names
        if all(parameters.get(name) == all_parameters[0].get(name) for parameters in all_parameters)
    }
    return shared, [name for name in names if name not in shared]


def label(case: str, parameters: Mapping[str, Parameter], names: Iterable[str]) -> str:
    """The case, with those of its parameters that matter."""
    chosen = {name: parameters[name] for name in names if name in parameters}
    return f"{case} · {show_parameters(chosen)}" if chosen else case


def kind_of(results: Iterable[Result]) -> str:
    kinds = {result.measured for result in results}
    return "Measured and counted." if len(kinds) == 2 else "Measured." if kinds == {True} else "Counted."
