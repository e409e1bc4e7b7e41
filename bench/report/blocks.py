"""What sections of a report are made of, before it is Markdown or a page."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trimegatron.bench.results import OURS


@dataclass(frozen=True)
class Shade:
    """A cell that is coloured by how near to the best a value is, 1 being there."""

    share: float
    text: str


@dataclass(frozen=True)
class Table:
    header: list[str]
    rows: list[list[str | Shade]]
    title: str = ""
    """Of a table that opens on demand."""


@dataclass(frozen=True)
class Bar:
    """One variant's figure."""

    variant: str
    value: float
    text: str
    ratio: str
    """To the best of ours; nothing for ours."""

    @property
    def is_ours(self) -> bool:
        return self.variant.startswith(OURS)


@dataclass(frozen=True)
class Bars:
    """The variants of one case."""

    label: str
    parameters: str
    """Those that tell it from others."""
    figure: str
    bars: list[Bar]
    gain: float
    """How many times better the best of ours is than the best of the others."""

    @property
    def verdict(self) -> str:
        if 1 / 1.005 <= self.gain <= 1.005:
            return "equal"
        times = max(self.gain, 1 / self.gain) if self.gain else math.inf
        shown = f"{times:.2f} × " if times < math.inf else ""
        return f"{shown}{'better' if self.gain > 1 else 'worse'}"


@dataclass(frozen=True)
class Line:
    """Points of a plot, joined where they are in a row."""

    name: str
    points: tuple[tuple[float, float], ...]
    text: str

    @property
    def is_ours(self) -> bool:
        return self.name.startswith(OURS)


@dataclass(frozen=True)
class Plot:
    """Both axes logarithmic."""

    title: str
    x: str
    y: str
    lines: list[Line]


Block = Table | Bars | Plot


@dataclass
class Section:
    title: str
    lines: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    is_good: bool | None = None
    """Of a section that passes a judgement."""
