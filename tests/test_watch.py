"""A rank that fails, or hangs, is named: with its phase and the cause, once, and the run ends within seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.parallel import free_port, rank_environment, run_ranks
from tests.runs import tiny_flags
from trimegatron import train
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.trainer import Trainer
from trimegatron.watch import Word, describe_hang


def boom(flags: list[str]) -> int:
    """Rank 1 fails in its first step."""
    finish = ParameterBuffer.finish

    def fail(self: ParameterBuffer) -> None:
        if os.environ["RANK"] == "1":
            raise RuntimeError("boom")  # as a broken collective is; but nobody is gone
        finish(self)

    ParameterBuffer.finish = fail  # type: ignore
    return train.main(flags)


def test_an_exception(corpus: Path, capfd: pytest.CaptureFixture):
    started = time.monotonic()
    assert run_ranks(2, boom, tiny_flags(corpus)) == [1, 1]
    assert time.monotonic() - started < 30
    err = capfd.readouterr().err
    assert err.count("Traceback") == 1 and err.count("trimegatron train: error: ") == 1
    assert "error: rank 1, iteration 1, summing gradients: RuntimeError: boom" in err


def forked(function: Callable[[int, int, list[str]], None], flags: list[str], world_size: int = 2) -> list[int | None]:
    """The exit codes of ranks that may not come to an end of their own; None of one that has not."""
    port, context = free_port(), multiprocessing.get_context("fork")
    ranks = [context.Process(target=function, args=(rank, port, flags)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    until = time.monotonic() + 50
    while sum(process.is_alive() for process in ranks) > (function is stopped) and time.monotonic() < until:
        time.sleep(0.05)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def killed(victim: int, world_size: int, rank: int, port: int, flags: list[str]) -> None:
    """One rank is killed in its first step."""
    os.environ |= rank_environment(rank, world_size, port)
    if rank == victim:
        Trainer.train_step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    sys.exit(train.main(flags))


def test_a_rank_is_killed(corpus: Path, capfd: pytest.CaptureFixture):
    """The others find out which, and one of them says so."""
    started = time.monotonic()
    flags = tiny_flags(corpus, global_batch_size=6)
    assert forked(partial(killed, 1, 3), flags, world_size=3) == [1, -signal.SIGKILL, 1]
    assert time.monotonic() - started < 30
    err = capfd.readouterr().err
    assert "Traceback" not in err and err.count("trimegatron train: error: ") == 1
    assert ", iteration 1, " in err and ": rank 1 is gone: killed, or its machine or its network (RuntimeError: " in err


def test_the_rank_with_the_store_is_killed(corpus: Path, capfd: pytest.CaptureFixture):
    assert forked(partial(killed, 0, 2), tiny_flags(corpus)) == [-signal.SIGKILL, 1]
    err = capfd.readouterr().err
    assert "trimegatron train: error: rank 1, iteration 1, " in err and "Traceback" not in err
    assert ": rank 0 is gone: the connection to the store at 127.0.0.1:" in err


def stopped(rank: int, port: int, flags: list[str]) -> None:
    """Rank 0, which holds the store, does not run any more, as if it were cut off."""
    os.environ |= rank_environment(rank, 2, port)
    if rank == 0:
        Trainer.train_step = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore
    sys.exit(train.main(flags))


def test_the_store_does_not_answer(corpus: Path, capfd: pytest.CaptureFixture):
    assert forked(stopped, tiny_flags(corpus, hang_timeout_in_mins=0.05)) == [None, 1]
    err = capfd.readouterr().err
    assert err.count("trimegatron train: error: ") == 1 and "Traceback" not in err
    assert "error: rank 1, iteration 1, summing gradients: the store at 127.0.0.1:" in err
    assert " has not answered for 3 s; its machine is gone, or the network to it" in err


def take_a_nap() -> None:
    time.sleep(60)


def hang(rank: int, port: int, flags: list[str]) -> None:
    """Rank 1 sleeps in its fourth step, while rank 0 waits for its gradients."""
    os.environ |= rank_environment(rank, 2, port)
    step = Trainer.train_step

    def slow_step(self: Trainer, batches: Any) -> Any:
        if rank == 1 and self.progress.iteration == 3:
            take_a_nap()
        return step(self, batches)

    Trainer.train_step = slow_step  # type: ignore
    train.main(flags)


def test_a_hang(corpus: Path, capfd: pytest.CaptureFixture):
    started = time.monotonic()
    assert forked(hang, tiny_flags(corpus, hang_timeout_in_mins=0.15)) == [1, 1]  # long enough for a busy machine
    assert time.monotonic() - started < 40
    err = capfd.readouterr().err
    (line,) = (line for line in err.splitlines() if "trimegatron train: error: " in line)
    behind, waiting = line.split(". Waiting: ")
    assert "no rank has gone on for 9 s (--hang-timeout-in-mins). Behind: rank 1: iteration 4, " in behind
    assert "take_a_nap" in behind and "rank 0" not in behind
    assert waiting.startswith("rank 0: iteration 4, summing gradients, at trimegatron/data_parallel/")


def words(*given: tuple[int, str, int]) -> list[Word | None]:
    """(notes, place, beat) of each rank."""
    return [Word(rank, notes, "a step", place, beat) for rank, (notes, place, beat) in enumerate(given)]


def test_who_is_behind():
    waits, works = "trimegatron/x.py:1 f > torch/distributed/y.py:2 all_reduce", "trimegatron/x.py:3 g"
    told = describe_hang(words((9, waits, 1), (7, works, 1)), words((9, waits, 3), (7, works, 3)), 60.0)
    assert told == (
        "no rank has gone on for 60 s (--hang-timeout-in-mins). Behind: rank 1: a step, at "
        f"{works}. Waiting: rank 0: a step, at {waits}"
    )
    # All in the same phase: who is not in a collective.
    told = describe_hang(words((9, waits, 1), (9, works, 1)), words((9, waits, 3), (9, works, 3)), 60.0)
    assert "Behind: rank 1: a step" in told and "Waiting: rank 0" in told
    # All wait for each other.
    told = describe_hang(words((9, waits, 1), (9, waits, 1)), words((9, waits, 3), (9, waits, 3)), 60.0)
    assert "Behind: rank 0: a step" in told and "; rank 1: a step" in told and "Waiting" not in told
    # A process that is stopped says nothing between the readings, wherever it was.
    told = describe_hang(words((9, waits, 1), (9, waits, 1)), words((9, waits, 3), (9, waits, 1)), 60.0)
    assert "Behind: rank 1 does not run (stopped, or its machine is gone); its last word was a step" in told
    told = describe_hang([None, *words((9, waits, 1))], [None, Word(1, 9, "a step", waits, 2)], 60.0)
    assert "Behind: rank 0 does not run" in told and "last word" not in told
