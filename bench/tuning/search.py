"""The search for one kernel's configuration: compile, compare, time; the default stays unless it is clearly beaten."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from trimegatron.bench.aot import Code
from trimegatron.bench.tuning.targets import Settings, Target, candidates, settings_text, unfit
from trimegatron.kernels.configs import TUNED_OPS
from trimegatron.kernels.source_hash import source_hash

MARGIN = 1.03
"""How many times faster than the default a candidate must be: less is noise, and the default needs no record."""
_ROUNDS = 3  # in which the best candidate and the default are timed again, in turns


@dataclass(frozen=True)
class Tools:
    """What the search asks a machine."""

    compile: Callable[[Target, Settings], Code]
    why_wrong: Callable[[Target, Settings], str | None]
    seconds: Callable[[Target, Settings], list[float]] | None
    """Times of a few runs; None in a dry run."""
    shared_limit: int
    """Bytes of shared memory that a program may have."""
    clock: Callable[[], float] = time.monotonic


@dataclass
class Candidate:
    """One configuration and what became of it: pruned, wrong, or right with or without ``seconds``."""

    settings: Settings
    outcome: str
    reason: str | None = None
    code: Code | None = None
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Found:
    """What the search came to. The first candidate is the default, which is not pruned."""

    target: Target
    candidates: list[Candidate] = field(default_factory=list)
    left_out: int = 0
    """Candidates that the time did not reach."""
    winner: Candidate | None = None
    """None where the default is wrong, or nothing was timed beside it though there was something."""

    @property
    def default(self) -> Candidate:
        return self.candidates[0]

    def record(self, floor_bytes: int, copy_rate: float) -> dict[str, Any]:
        """For the table. Rates are of the bytes that the case has to move; ``copy_rate`` in bytes per second."""
        assert self.winner is not None
        (op, dtype, shape), tuned = self.target.key, TUNED_OPS[self.target.key[0]]

        def timed(candidate: Candidate) -> dict[str, Any]:
            if not candidate.seconds:
                return {}
            rate = floor_bytes / candidate.median
            return {"median_s": candidate.median, "seconds": candidate.seconds, "GB_per_s": rate / 1e9,
                    "of_copy": rate / copy_rate}  # fmt: skip

        def used(code: Code | None) -> dict[str, Any]:
            names = ("registers", "spill_bytes", "shared_bytes")
            return {} if code is None else {name: getattr(code, name) for name in names}

        return {
            "op": op, "dtype": dtype, "shape": dict(shape), "config": self.winner.settings,
            "source": source_hash(tuned.module, tuned.kernel), "is_default": self.winner is self.default,
            "timed_in": {"case": self.target.case, **asdict(self.target.work), "floor_bytes": floor_bytes},
            **timed(self.winner), "default_median_s": self.default.median, "left_out": self.left_out,
            "candidates": [
                {"config": c.settings, "outcome": c.outcome, **({"reason": c.reason} if c.reason else {}),
                 **used(c.code), **timed(c)}
                for c in self.candidates
            ],
        }  # fmt: skip

    def text(self) -> str:
        """One line."""
        outcomes = Counter(c.reason.partition(" ")[0] if c.outcome == "pruned" and c.reason else c.outcome
                           for c in self.candidates[1:])  # fmt: skip
        names = {"spills": "spill", "takes": "too much shared memory", "loses": "lose 128-bit access"}
        counts = [f"{count} {names.get(name, name)}" for name, count in sorted(outcomes.items())]
        if self.left_out:
            counts.append(f"{self.left_out} left out, the time was up")
        parts = [f"{self.target}: default {settings_text(self.default.settings)} {self.default.outcome}"]
        parts.append(f"{len(self.candidates) - 1 + self.left_out} candidates: {', '.join(counts) or 'none'}")
        if self.default.outcome == "wrong":
            parts.append(f"NOT TUNED, the default is wrong: {self.default.reason}")
        elif self.winner is None and self.default.seconds:
            parts.append("no record")
        elif self.winner is not None:
            gain = self.default.median / self.winner.median
            kept = self.winner is self.default
            parts.append("default kept" if kept else f"{settings_text(self.winner.settings)} is {gain:.2f}× as fast")
        return "; ".join(parts)


def search(target: Target, tools: Tools, until: float) -> Found:
    """Try the candidates until the clock says ``until``; the default always."""
    found = Found(target)
    default = tools.compile(target, target.default)
    found.candidates.append(_run(target, target.default, default, tools))
    if found.default.outcome == "wrong":
        return found
    for settings in candidates(target):
        if tools.clock() >= until:
            found.left_out += 1
        else:
            found.candidates.append(_try(target, settings, default, tools))
    if tools.seconds is not None:
        found.winner = _winner(found, tools)
    return found


def _try(target: Target, settings: Settings, default: Code, tools: Tools) -> Candidate:
    try:
        code = tools.compile(target, settings)
    except Exception as error:  # Triton has many ways to say so
        reason = " ".join(f"fails to compile: {type(error).__name__}: {error}".split())[:300]
        return Candidate(settings, "pruned", reason)
    if unsuited := unfit(code, default, tools.shared_limit):
        return Candidate(settings, "pruned", unsuited, code)
    return _run(target, settings, code, tools)


def _run(target: Target, settings: Settings, code: Code, tools: Tools) -> Candidate:
    """Compare, and time what is right."""
    if reason := tools.why_wrong(target, settings):
        return Candidate(settings, "wrong", reason, code)
    seconds = [] if tools.seconds is None else tools.seconds(target, settings)
    return Candidate(settings, "right", None, code, seconds)


def _winner(found: Found, tools: Tools) -> Candidate | None:
    """The fastest, if it is ``MARGIN`` times as fast as the default, also when both are timed again."""
    assert tools.seconds is not None
    default, others = found.default, [c for c in found.candidates[1:] if c.seconds]
    if not others:
        return None if found.left_out else default
    best = min(others, key=lambda c: c.median)
    if default.median >= MARGIN * best.median:
        for _ in range(_ROUNDS):
            for candidate in (default, best):
                candidate.seconds += tools.seconds(found.target, candidate.settings)
    return best if default.median >= MARGIN * best.median else default
