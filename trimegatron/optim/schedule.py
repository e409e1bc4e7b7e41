"""Learning rate and weight decay as functions of the samples that successful steps have consumed.

A step is made with the rate at the samples consumed before it: with warm-up, the first step's rate is zero.
Source: Megatron-LM's optimizer parameter scheduler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to ``max_lr``, then constant, or linear or cosine decay to ``min_lr``.

    With s samples consumed, W ``warmup_samples`` and T ``decay_samples`` (which include the warm-up), r = (s − W) / (T − W):
    s ≤ W: max · s / W;  s > T: min;  linear: min + (max − min)(1 − r);  cosine: min + (max − min)(cos πr + 1) / 2.
    """

    max_lr: float
    min_lr: float
    warmup_samples: int
    decay_samples: int
    style: str

    def __call__(self, samples: int) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.max_lr * samples / self.warmup_samples
        if self.style == "constant":
            return self.max_lr
        if samples > self.decay_samples:
            return self.min_lr
        r = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        if self.style == "linear":
            left = 1.0 - r
        else:
            assert self.style == "cosine", "checked when the configuration is built"
            left = 0.5 * (math.cos(math.pi * r) + 1.0)
        return self.min_lr + left * (self.max_lr - self.min_lr)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Constant, or a linear or cosine ramp from ``start`` to ``end`` over ``total_samples``."""

    start: float
    end: float
    total_samples: int
    style: str

    def __call__(self, samples: int) -> float:
        if self.style == "constant" or samples >= self.total_samples:
            return self.end
        r = samples / self.total_samples
        if self.style == "cosine":
            r = 0.5 * (math.cos(math.pi * (1.0 - r)) + 1.0)
        else:
            assert self.style == "linear", "checked when the configuration is built"
        return self.start + r * (self.end - self.start)
