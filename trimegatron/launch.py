"""``trimegatron train [--nproc-per-node N] FLAGS``: training through torch's own launcher.

What it adds to bare torchrun: the configuration is checked before a process starts, a failure is printed once, the
worker's exit code is passed on, and a signal is passed on to the workers, which get all the time they need to save.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trimegatron.config import parse_train_args
from trimegatron.errors import ConfigError, complain

PROCESSES_FLAG = ("--nproc-per-node", "--nproc_per_node")
PASSED_ON = ("SIGTERM", "SIGUSR1", "SIGUSR2")
"""Signals that the workers are to answer; of the others torch's launcher takes care."""
PROC = Path("/proc")
"""Where Linux tells of processes. Elsewhere a signal ends the launcher and, after 30 s, its workers, as torchrun."""


def main(argv: list[str]) -> int:
    """Check the configuration, then train in this process, or in N."""
    num_processes, flags = take_num_processes(argv)
    if num_processes > 1 and any(flag in flags for flag in ("--dry-run", "--dry_run")):
        num_processes, flags = 1, ["--world-size", str(num_processes), *flags]
    if num_processes == 1:
        from trimegatron import train

        return train.main(flags)
    parse_train_args(flags, world_size=num_processes)
    with passing_signals_on():
        return launch(num_processes, flags)


def take_num_processes(argv: list[str]) -> tuple[int, list[str]]:
    """``--nproc-per-node N`` or ``=N``, and the flags without it."""
    flags: list[str] = []
    value: str | None = "1"
    words = iter(argv)
    for word in words:
        name, equals, given = word.partition("=")
        if name in PROCESSES_FLAG:
            value = given if equals else next(words, None)
        else:
            flags.append(word)
    if value is None or not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"--nproc-per-node ({value}) must be a whole number from 1 on: the processes of this machine")
    return int(value), flags


def launch(num_processes: int, flags: list[str]) -> int:
    """Run ``python -m trimegatron.train FLAGS`` in ``num_processes`` processes of this machine."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The worker has said what was wrong; the launcher would say it again, with a traceback of its own.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    launcher = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT" if PROC.is_dir() else "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    )
    try:
        elastic_launch(launcher, sys.executable)("-m", "trimegatron.train", *flags)
    except ChildFailedError as error:
        codes = [failure.exitcode for failure in error.failures.values()]
        # A worker that knows what is wrong has a code of its own; one that a signal ended has minus its number.
        rank, first = error.get_first_failure()
        if first.exitcode < 0:
            complain("train", f"rank {rank} was ended by {name_of(-first.exitcode)}")
        code = next((code for code in codes if code > 1), first.exitcode)
        return code if code > 0 else 128 - code
    except SignalException as error:
        complain("train", f"stopped by signal {error.sigval.name}", is_error=False)
        return 128 + error.sigval
    return 0


def name_of(number: int) -> str:
    """``SIGKILL`` for 9; the number where Python has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def passing_signals_on() -> Iterator[None]:
    """While it is entered, signals to this process go to its children, and it goes on waiting for them."""
    if not PROC.is_dir():
        yield
        return

    def pass_on(number: int, _: FrameType | None) -> None:
        for pid in children_of(os.getpid()):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it has ended meanwhile

    before = {name: signal.signal(signal.Signals[name], pass_on) for name in PASSED_ON}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


def children_of(parent: int) -> list[int]:
    """The processes that ``parent`` has started and that have not ended, by Linux's /proc; none elsewhere."""
    found = []
    for entry in PROC.glob("[0-9]*"):
        try:
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if int(ppid) == parent and state != "Z":
            found.append(int(entry.name))
    return found
