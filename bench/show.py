"""How a figure is written down for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimegatron.bench.results import Parameter, Result

_PREFIXES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "bytes": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")),
}


def show_value(value: float, unit: str) -> str:
    """Three to four digits and the unit: ``12.3 ms``, ``1,234 samples/s``."""
    size, prefixed = _prefix(value, unit)
    return f"{show_number(value / size)} {prefixed}".rstrip()


def _prefix(value: float, unit: str) -> tuple[float, str]:
    """The unit to show a value in, and how many of the unit it is."""
    return next((prefix for prefix in _PREFIXES.get(unit, ()) if abs(value) >= prefix[0]), (1.0, unit))


def show_number(value: float) -> str:
    """Whole from 1000 on, else four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_parameters(parameters: Mapping[str, Parameter]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {show_parameter(value)}" for name, value in parameters.items())


def show_parameter(value: Parameter) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else value


def show_share(result: Result) -> str:
    """How near to the floor: ``1.03 × the least``, ``81% of the most``; nothing where there is none."""
    if not result.floor:
        return ""
    if result.better == "lower":
        return f"{result.median / result.floor:.3f} × the least"
    return f"{result.median / result.floor:.1%} of the most"


def show_range(result: Result) -> str:
    """The median, and the least and the most of several values: ``12.3 ms (12.1 to 13)``."""
    shown = show_value(result.median, result.unit)
    if len(result.values) == 1:
        return shown
    size, _ = _prefix(result.median, result.unit)
    return f"{shown} ({show_number(min(result.values) / size)} to {show_number(max(result.values) / size)})"


def show_machine(machine: Mapping[str, Any]) -> str:
    """GPU, processor and cores."""
    cpu = f"{machine.get('cpu', 'unknown processor')}, {machine.get('cores', '?')} cores"
    return f"{machine['gpu']}; {cpu}" if machine.get("gpu") else cpu


def show_result(result: Result) -> str:
    """One line of a benchmark's output."""
    name = f"{result.case}, {result.variant}, {result.figure}"
    parts = [show_range(result), show_share(result), result.note]
    return f"{name:60} {'  '.join(part for part in parts if part)}  [{show_parameters(result.parameters)}]"
