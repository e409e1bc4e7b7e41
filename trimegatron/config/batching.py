"""How many samples a step takes: always as many, or more and more with --rampup-batch-size; Megatron-LM's rule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """The global batch of a step as a function of the samples that all steps before it consumed, skipped ones too.

    With n = (full - start) / increment, a ramp is n equal parts of ``ramp_samples`` samples: a step that begins in
    part k (from 0) takes start + k · increment, one that begins behind the ramp takes ``full``.
    """

    full: int
    start: int
    increment: int = 0
    ramp_samples: int = 0

    def at(self, consumed_samples: int) -> int:
        """Samples of the step that begins after ``consumed_samples``."""
        if consumed_samples > self.ramp_samples or self.start == self.full:
            return self.full
        num_increments = (self.full - self.start) // self.increment
        # In floating point, as Megatron: where a part's end is not whole its rounding decides.
        part = int(consumed_samples / (self.ramp_samples / num_increments))
        return self.start + part * self.increment

    def sizes(self) -> list[int]:
        """Every size on the way, in order."""
        return [*range(self.start, self.full, self.increment or self.full), self.full]

    def within(self, samples: float) -> tuple[int, int]:
        """The whole steps in the first ``samples`` samples, and how many samples these steps consume."""
        steps = consumed = 0
        while (size := self.at(consumed)) < self.full:
            if consumed + size > samples:
                return steps, consumed
            steps, consumed = steps + 1, consumed + size
        rest = int(max(samples - consumed, 0) // self.full)
        return steps + rest, consumed + rest * self.full

    def num_steps(self, samples: float) -> int:
        """The iterations of a run over ``samples``; what is left behind the last whole one is not used."""
        return self.within(samples)[0]

    def iteration_at(self, samples: float) -> float:
        """Steps that consume ``samples``; a fraction where that is in the middle of one."""
        steps, consumed = self.within(samples)
        return steps + (samples - consumed) / self.at(consumed)
