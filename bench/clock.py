"""Time on a device: marks between pieces of work, and repeats of one piece with a cold cache."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

REPEATS = 5


class Clock:
    """Marks between pieces of work: events in the stream of a GPU, which nothing waits for, or the time."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> torch.cuda.Event | float:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @staticmethod
    def seconds(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
        """Between two marks, after :meth:`wait`."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return end - start
        return start.elapsed_time(end) / 1e3


def repeat(run: Callable[[], object], flush: torch.Tensor) -> list[float]:
    """Seconds of some runs, each after ``flush`` has been written over and with it the L2 cache. The first run, in
    which what is compiled is compiled, is not among them."""
    clock = Clock(flush.device)
    run()
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start = clock.mark()
        run()
        end = clock.mark()
        clock.wait()
        times.append(clock.seconds(start, end))
    return times
