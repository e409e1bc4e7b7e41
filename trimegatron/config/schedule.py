"""The learning-rate schedule of Megatron-LM as a function of consumed samples, and its corner points."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The rate rises linearly from 0 to ``lr`` at ``warmup_samples``, and falls to ``min_lr`` at ``decay_samples``.

    Only samples of steps that updated the weights count (an fp16 overflow does not). Step k trains with the rate at
    (k - 1) x global batch samples, so with a warm-up the first step has the rate 0.
    """

    lr: float
    min_lr: float
    style: str
    """constant, linear or cosine"""
    warmup_samples: float
    """A fraction of the decay length need not be whole."""
    decay_samples: int
    total_samples: int
    """Of the run; weight decay ramps over it."""

    def learning_rate(self, samples: float) -> float:
        """The rate after ``samples``: with r = (samples - warm-up) / (decay - warm-up), min + (max - min) · shape(r),
        where shape is 1 - r (linear) or (1 + cos πr) / 2 (cosine)."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.lr * samples / self.warmup_samples
        if self.style == "constant":
            return self.lr
        if samples > self.decay_samples:
            return self.min_lr
        r = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        shape = 1 - r if self.style == "linear" else (1 + math.cos(math.pi * r)) / 2
        return self.min_lr + (self.lr - self.min_lr) * shape
