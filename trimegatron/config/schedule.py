"""Learning rate and weight decay as functions of the samples that successful steps have consumed; Megatron-LM's rules.

Step k is made with the values at the samples consumed before it, (k - 1) x global batch where no step was skipped
(an fp16 overflow does not count): with a warm-up the first step's rate is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The rate rises linearly from 0 to ``lr`` at ``warmup_samples``, and falls to ``min_lr`` at ``decay_samples``.

    The weight decay is constant, or ramps over the whole run.
    """

    lr: float
    min_lr: float
    style: str
    """constant, linear or cosine"""
    warmup_samples: float
    """A fraction of the decay length need not be whole."""
    decay_samples: int
    """Where the decay ends, the warm-up included."""
    total_samples: int
    """Of the run."""
    start_weight_decay: float
    end_weight_decay: float
    weight_decay_style: str
    """constant, linear or cosine"""

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

    def weight_decay(self, samples: float) -> float:
        """The decay after ``samples``: with r = samples / run, start + (end - start) · shape(r), where shape is r
        (linear) or (1 + cos π(1 - r)) / 2 (cosine)."""
        if self.weight_decay_style == "constant" or samples >= self.total_samples:
            return self.end_weight_decay
        r = samples / self.total_samples
        shape = r if self.weight_decay_style == "linear" else (1 + math.cos(math.pi * (1 - r))) / 2
        return self.start_weight_decay + (self.end_weight_decay - self.start_weight_decay) * shape
