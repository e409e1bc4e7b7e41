"""Learning rate and weight decay as functions of the samples that successful steps have consumed; Megatron-LM's rules.

Step k is made with the values at the samples consumed before it, (k - 1) x global batch where no step was skipped
(an fp16 overflow does not count): with a warm-up the first step's rate is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def _shape(style: str, r: float) -> float:
    """A fall from 1 at r = 0 to 0 at r = 1."""
    if style == "linear":
        return 1.0 - r
    if style == "cosine":
        return (1.0 + math.cos(math.pi * r)) / 2.0
    if style == "exponential":
        return 2.0 * 0.5**r - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(r)


@dataclass(frozen=True)
class Schedule:
    """The rate rises linearly from ``start_lr`` to ``lr`` at ``warmup_samples``, and falls to ``min_lr`` at
    ``decay_samples``.

    The weight decay is constant, or ramps over the whole run.
    """

    lr: float
    min_lr: float
    style: str
    """One of ``DECAY_STYLES``."""
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
    start_lr: float = 0.0
    """Where the warm-up starts."""
    wsd_style: str | None = None
    """With WSD (warm-up, stable, decay): the shape of the decay, one of ``WSD_STYLES``."""
    wsd_samples: int = 0
    """With WSD: the length of the decay; until then the rate is ``lr``."""

    @property
    def stable_samples(self) -> int:
        """With WSD: where the decay begins."""
        return self.decay_samples - self.wsd_samples

    def learning_rate(self, samples: float) -> float:
        """The rate after ``samples``.

        In the warm-up start + (lr - start) · samples / warm-up; behind the decay's end min_lr. In between:

        - constant: lr, for ever;
        - linear, cosine: min_lr + (lr - min_lr) · shape(r), r = (samples - warm-up) / (decay - warm-up);
        - WSD: the same with r = 0 until the last ``wsd_samples``, and r their fraction that is over;
        - inverse-square-root: lr · √(warm-up / samples), at least min_lr; it jumps to min_lr at the decay's end.

        shape(r) is 1 - r (linear), (1 + cos πr) / 2 (cosine), 2 · 2⁻ʳ - 1 (exponential) or 1 - √r (minus_sqrt).
        """
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.start_lr + (self.lr - self.start_lr) * samples / self.warmup_samples
        if self.style == "constant":
            return self.lr
        if samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.lr * max(self.warmup_samples, 1) ** 0.5 / max(samples, 1) ** 0.5)
        if self.style == "WSD":
            assert self.wsd_style is not None
            style, r = self.wsd_style, max(0.0, samples - self.stable_samples) / self.wsd_samples
        else:
            style, r = self.style, (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return self.min_lr + (self.lr - self.min_lr) * _shape(style, r)

    def weight_decay(self, samples: float) -> float:
        """The decay after ``samples``: with r = samples / run, start + (end - start) · shape(r), where shape is r
        (linear) or (1 + cos π(1 - r)) / 2 (cosine)."""
        if self.weight_decay_style == "constant" or samples >= self.total_samples:
            return self.end_weight_decay
        r = samples / self.total_samples
        shape = r if self.weight_decay_style == "linear" else (1 + math.cos(math.pi * (1 - r))) / 2
        return self.start_weight_decay + (self.end_weight_decay - self.start_weight_decay) * shape
