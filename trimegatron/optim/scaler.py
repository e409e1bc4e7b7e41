"""Loss scaling for fp16, by Megatron's rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """A constant scale: 1 for fp32 and bf16, or what the user gave."""

    scale: float = 1.0

    def update(self, overflowed: bool) -> None:
        """Take note of one step."""

    def state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def load(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


@dataclass
class DynamicLossScaler(LossScaler):
    """Halve the scale when gradients overflow, double it after ``window`` consecutive clean steps.

    ``hysteresis`` overflows are counted before the scale is halved, and only a full clean window restores the count:
    so of two overflows in short order the second halves at once.
    """

    scale: float = 2.0**32
    min_scale: float = 1.0
    window: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        self.clean_steps = 0
        self.tolerance = self.hysteresis

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.clean_steps = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2.0, self.min_scale)
            return
        self.clean_steps += 1
        if self.clean_steps == self.window:
            self.clean_steps = 0
            self.tolerance = self.hysteresis
            self.scale *= 2.0

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "clean_steps": self.clean_steps, "tolerance": self.tolerance}

    def load(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]
        self.clean_steps = int(state["clean_steps"])
        self.tolerance = int(state["tolerance"])
