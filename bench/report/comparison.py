"""Results beside those of a run before: what is worse, what is better, and what cannot be told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trimegatron.bench.results import Result, Run
from trimegatron.bench.show import show_value

MACHINE = ("cpu", "cores", "gpu")
"""What two machines must share for their times to be compared."""


class Found(NamedTuple):
    """A result and the run it comes from."""

    result: Result
    run: Run


Key = tuple[str, Any]
"""Benchmark and identity."""


def merge(runs: Iterable[Run]) -> tuple[dict[Key, Found], int]:
    """All results of several runs, and how many were left out because a newer run has them too."""
    merged: dict[Key, Found] = {}
    total = 0
    for run in sorted(runs, key=lambda run: run.date):
        total += len(run.cases)
        for result in run.cases:
            merged[run.benchmark, result.identity] = Found(result, run)
    return merged, total - len(merged)


@dataclass(frozen=True)
class Change:
    """One result, before and now."""

    benchmark: str
    before: Result
    now: Result
    tolerance: float
    """Of what is measured, this share of the value before is never a change."""

    @property
    def worsening(self) -> float:
        """How much worse, in the unit of the figure; negative where it is better."""
        difference = self.now.median - self.before.median
        return difference if self.now.better == "lower" else -difference

    @property
    def noise(self) -> float:
        """A smaller difference says nothing: the spreads of both runs' repeats together, and the tolerance.
        What is counted has none but rounding."""
        if not self.now.measured:
            return 1e-9 * abs(self.before.median)
        spreads = sum(max(result.values) - min(result.values) for result in (self.before, self.now))
        return spreads + self.tolerance * abs(self.before.median)

    @property
    def is_worse(self) -> bool:
        return self.worsening > self.noise

    @property
    def is_better(self) -> bool:
        return -self.worsening > self.noise

    @property
    def difference_text(self) -> str:
        """``+10.9%``, of the value before."""
        before = self.before.median
        return f"{(self.now.median - before) / abs(before):+.1%}" if before else "from nothing"

    @property
    def noise_text(self) -> str:
        """The same of the noise."""
        before = self.before.median
        return f"{self.noise / abs(before):.1%}" if before else show_value(self.noise, self.now.unit)


@dataclass
class Comparison:
    """What ``compare`` found."""

    changes: list[Change] = field(default_factory=list)
    unjudged: dict[str, list[Found]] = field(default_factory=dict)
    """Why → results that were in both and could not be compared."""
    missing: list[Found] = field(default_factory=list)
    """In the baseline only, of benchmarks that ran now too."""
    added: list[Found] = field(default_factory=list)

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.is_worse]

    @property
    def better(self) -> list[Change]:
        return [change for change in self.changes if change.is_better]


def compare(baseline: dict[Key, Found], now: dict[Key, Found], tolerance: float) -> Comparison:
    """Every result that is in both; ``tolerance`` as in ``Change``."""
    found = Comparison()
    for key, new in now.items():
        old = baseline.get(key)
        if old is None:
            found.added.append(new)
        elif reason := cannot_compare(old, new):
            found.unjudged.setdefault(reason, []).append(new)
        else:
            found.changes.append(Change(key[0], old.result, new.result, tolerance))
    ran = {benchmark for benchmark, _ in now}
    found.missing += [old for key, old in baseline.items() if key[0] in ran and key not in now]
    return found


def cannot_compare(old: Found, new: Found) -> str:
    """Why not; nothing where they can be."""
    if not new.result.measured:
        return ""
    if any(old.run.machine.get(name) != new.run.machine.get(name) for name in MACHINE):
        return "measured on another machine"
    if min(len(old.result.values), len(new.result.values)) < 2:
        return "measured once only, so that the noise is not known"
    return ""
