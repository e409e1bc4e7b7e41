"""Run a function on several gloo ranks of this machine, for tests."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from trimegatron.launch import children_of


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would tell one of the ranks, all on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """What ``function(*args)`` returns on each rank (tensors, numbers, text, and containers of them), each in a forked
    process with torchrun's environment.

    Forking a process whose OpenMP has started threads hangs its children, so the parent must run on one
    (tests/conftest.py).
    """
    assert torch.get_num_threads() == 1
    port = free_port()
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    ranks = [
        context.Process(target=_one_rank, args=(rank, world_size, port, function, args, results))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        answers: dict[int, Any] = {}
        for _ in range(world_size):
            try:
                rank, result, error = results.get(timeout=timeout)
            except queue.Empty:
                for process in ranks:
                    print_stacks(process.pid)
                raise AssertionError(f"of {world_size} ranks only {sorted(answers)} answered in {timeout} s") from None
            assert error is None, f"rank {rank}:\n{error}"
            answers[rank] = torch.load(io.BytesIO(result), weights_only=True)
        return [answers[rank] for rank in range(world_size)]
    finally:
        for process in ranks:
            process.join(timeout=5)
            process.kill()


def print_stacks(pid: int | None) -> None:
    """Have a rank and its data workers print where they are, to their standard error."""
    for process in (pid, *children_of(pid)) if pid is not None else ():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(process, signal.SIGQUIT)
            time.sleep(0.5)  # one after the other


def _one_rank(
    rank: int, world_size: int, port: int, function: Callable[..., Any], args: tuple[Any, ...], results: Any
) -> None:
    os.environ |= rank_environment(rank, world_size, port)
    faulthandler.register(signal.SIGQUIT, file=2)
    gc.freeze()  # what the tests before left for collection, whose threads are not in this process
    try:
        # As bytes: a tensor in a queue is shared memory, which goes with the process that made it.
        result = io.BytesIO()
        torch.save(function(*args), result)
        results.put((rank, result.getvalue(), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
