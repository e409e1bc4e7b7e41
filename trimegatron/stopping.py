"""What ends a run before its last iteration: a signal, the stop file, ``--exit-interval``, ``--exit-duration-in-mins``.

A rank that is asked to stop says so in a sum over all ranks that is made anyway: in each step, at the end of each
evaluation and of each save. So all ranks know at the same place, and nothing waits for the answer.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from trimegatron.config import Config
from trimegatron.errors import StoppedError

STOP_FILE = "STOP"
ALWAYS = ("SIGTERM", "SIGUSR1")
LOOK_SECONDS = 1.0
"""Between two looks for the stop file: on a network's disk each is a message."""


class SignalTrap:
    """Takes note of the signals that ask for a stop, while it is entered.

    As long as ``is_starting``, nothing is trained that could be saved: a signal then raises StoppedError where this
    process is. Afterwards it only leaves ``received``.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.is_starting = True
        self.is_over = False
        """The run has failed: a signal changes nothing any more."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalTrap:
        for name in ALWAYS:
            self.add(name)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def add(self, name: str) -> None:
        """Take note of this one too. Only a process's main thread can."""
        number = signal.Signals[name]
        if threading.current_thread() is threading.main_thread() and number not in self._before:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.received is not None or self.is_over:
            return
        self.received = signal.Signals(number)
        if self.is_starting:
            raise StoppedError(f"stopped by {self.received.name} before the first step; there is nothing to save")
        # The signal may have come in the middle of a print.
        rank = os.environ.get("RANK", "0")
        os.write(2, f"rank {rank}: {self.received.name}: the run will save and stop\n".encode())


class Stopping:
    """Whether the run stops, and with which exit code; alike on all ranks."""

    def __init__(self, config: Config, *, looks_for_file: bool, trap: SignalTrap, say: Callable[[str], None]):
        training, save = config.training, config.checkpoint.save
        self.exit_interval = training.exit_interval
        self.minutes = training.exit_duration_in_mins
        self.out_of_time_at = math.inf if self.minutes is None else time.monotonic() + self.minutes * 60.0
        self.trap = trap
        self.say = say
        self.stop_file = Path(save) / STOP_FILE if save and looks_for_file else None
        self._file_is_there = False
        self._looked = -math.inf
        self.is_asked = self.is_out_of_time = False
        self.exit_code = 0

    def wishes(self) -> list[float]:
        """This rank's part of the sum: whether a signal or the file asks for the end, and whether the time is over."""
        now = time.monotonic()
        if self.stop_file is not None and not self._file_is_there and now - self._looked > LOOK_SECONDS:
            self._looked = now
            self._file_is_there = self.stop_file.exists()
        return [float(self.trap.received is not None or self._file_is_there), float(now > self.out_of_time_at)]

    def heed(self, sums: Sequence[float]) -> None:
        """Take the sums of all ranks' wishes."""
        asked, out_of_time = sums
        self.is_asked |= asked > 0
        self.is_out_of_time |= out_of_time > 0

    def stops_at(self, iteration: int) -> bool:
        """Whether the run ends here; says why."""
        if self.is_asked:
            self.exit_code = StoppedError.exit_code
            cause = f"{self.stop_file} is there" if self._file_is_there else "a signal came"
        elif self.exit_interval is not None and iteration % self.exit_interval == 0:
            cause = f"--exit-interval {self.exit_interval}"
        elif self.is_out_of_time:
            cause = f"--exit-duration-in-mins {self.minutes}"
        else:
            return False
        self.say(f"{cause}: stopping at iteration {iteration}")
        return True

    def take_file_away(self) -> None:
        """It has done its work once the run ends; unless torchrun starts the run again, which is to stop too."""
        if self._file_is_there and self.stop_file is not None and not has_restarts_left():
            self.stop_file.unlink(missing_ok=True)


def has_restarts_left() -> bool:
    """Whether torchrun starts this run once more if it ends with an exit code other than 0."""
    done, most = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return int(done) < int(most)
