"""When Python collects cyclic garbage: when it likes, or with ``--manual-gc`` at the same step on every rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from trimegatron.config import TrainingConfig


class GarbageCollection:
    """Entered for the time of the training loop; without ``--manual-gc`` it does nothing.

    A rank that collects makes all others wait in the next collective; where all collect at once they wait once.
    """

    def __init__(self, training: TrainingConfig):
        self.is_manual = training.manual_gc
        self.interval = training.manual_gc_interval
        self.in_evaluation = training.manual_gc and training.manual_gc_eval

    def __enter__(self) -> GarbageCollection:
        self.was_enabled = gc.isenabled()
        if self.is_manual:
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *_: object) -> None:
        if self.was_enabled:
            gc.enable()

    def after_step(self, iteration: int) -> None:
        """Collect every ``--manual-gc-interval`` steps; 0: never."""
        if self.is_manual and self.interval > 0 and iteration % self.interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect everything before an evaluation, and what it left behind it (the youngest objects) after it."""
        if self.in_evaluation:
            gc.collect()
        yield
        if self.in_evaluation:
            gc.collect(0)
