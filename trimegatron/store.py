"""The key-value store of a run, through which its ranks talk outside of collectives: before the first, after the last,
and beside one in which a rank waits.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from trimegatron.background import Task

T = TypeVar("T")
FAILURE = "trimegatron/exit code and number of the first rank that failed"
FAREWELL = 10.0
"""Seconds that a rank which fails gives the store to answer."""


class StoreLostError(RuntimeError):
    """The store does not answer, ``is_silent``, or its connection is closed."""

    def __init__(self, text: str, *, is_silent: bool):
        super().__init__(text)
        self.is_silent = is_silent


@dataclass
class _Known:
    """What this rank knows of the run, whichever of its connections it has heard it through."""

    failure: str = ""
    """Exit code and number of the first rank that failed."""
    lost: StoreLostError | None = None
    gone: list[int] = field(default_factory=list)
    """Ranks that did not answer a roll call."""


class RunStore:
    """torch's store, with a limit to every question.

    Its client waits a limited time for a key, but for the server's answer until the system gives the connection up:
    a quarter of an hour where the network is cut. So a thread asks, and is left behind.

    Args:
        store: this rank's connection.
        seconds: how long the server may take to answer, at most.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, seconds: float, known: _Known | None = None) -> None:
        self.rank, self.size, self.seconds = rank, size, seconds
        self._store, self._known = store, known or _Known()

    def clone(self, seconds: float) -> RunStore:
        """A connection of its own with another limit: a connection's next question waits for the answer to the last."""
        store = self._store.clone()  # type: ignore[attr-defined]
        return RunStore(store, rank=self.rank, size=self.size, seconds=seconds, known=self._known)

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """The value, waited for as long as torch's own store does."""
        return self._ask(lambda: self._store.get(key), self.seconds + FAREWELL).decode()

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of ``keys`` are there."""
        return self._ask(lambda: self._store.check(list(keys)))

    def report_failure(self, exit_code: int) -> tuple[bool, int]:
        """Leave word that this rank fails.

        Returns:
            Whether it is the first one, which is to say why; and the first one's exit code, with which all leave.
            Where the store is lost nobody can know, and each rank is the first.
        """
        mine = f"{exit_code} {self.rank}"
        try:
            if not self._known.failure:
                first = self._ask(lambda: self._store.compare_set(FAILURE, "", mine), FAREWELL)
                self._hear_of(first.decode())
        except StoreLostError:
            self._known.failure = self._known.failure or mine
        return self._known.failure == mine, int(self._known.failure.split()[0])

    def failure_code(self) -> int | None:
        """The exit code of the first rank that has failed, or None."""
        if not self._known.failure and self.check([FAILURE]):
            self._hear_of(self.get(FAILURE))
        return int(self._known.failure.split()[0]) if self._known.failure else None

    def _hear_of(self, failure: str) -> None:
        self._known.failure = failure
        self.set(_heard(self.rank), "")

    def call_the_roll(self, seconds: float) -> list[int]:
        """Ranks that have not heard of a failure after ``seconds``; those that live look for one every second."""
        until = time.monotonic() + seconds
        living = [_heard(rank) for rank in range(self.size) if rank not in self._known.gone]
        while not self.check(living) and time.monotonic() < until:
            time.sleep(0.02)
        self._known.gone = [rank for rank in range(self.size) if not self.check([_heard(rank)])]
        return self._known.gone

    def _ask(self, question: Callable[[], T], seconds: float | None = None) -> T:
        if self._known.lost is not None:
            raise self._known.lost
        limit = self.seconds if seconds is None else min(seconds, self.seconds + FAREWELL)
        task = Task(question)
        task.start()
        task.join(limit)
        if task.error is None and not task.is_alive():
            return task.result[0]
        if task.error is not None and not isinstance(task.error, dist.DistNetworkError):
            raise task.error
        store = f"the store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        is_silent = task.error is None
        text = f"{store} has not answered for {limit:.0f} s" if is_silent else f"the connection to {store} is lost"
        self._known.lost = StoreLostError(text, is_silent=is_silent)
        raise self._known.lost


def _heard(rank: int) -> str:
    return f"trimegatron/rank {rank} has heard of the failure"


def has_agent_store() -> bool:
    """Whether torchrun's agent holds the store, not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_this_start(store: dist.Store, rank: int, world_size: int, timeout: float) -> dist.Store:
    """A part of ``store`` that holds nothing yet.

    An agent's store outlives the ranks that it starts again: they would find the addresses and messages of those that
    are gone. How often it has started them differs from node to node, so the first rank draws a name. What a rank
    before may have left in the store is told from what one of now says by a token of each, and an answer to it.

    Raises:
        RuntimeError: some ranks did not come.
    """
    name = uuid.uuid4().hex
    until = time.monotonic() + timeout

    def wait() -> None:
        if time.monotonic() > until:
            raise RuntimeError(f"rank {rank} has waited {timeout:.0f} s for other ranks to start")
        time.sleep(0.02)

    if rank == 0:
        answered: dict[int, bytes] = {}
        while store.add(f"{name}/came", 0) < world_size - 1:
            for other in range(1, world_size):
                key = f"trimegatron/token of rank {other}"
                if store.check([key]) and (token := store.get(key)) != answered.get(other):
                    answered[other] = token
                    store.set(f"{token.decode()}/name", name)
            wait()
    else:
        store.set(f"trimegatron/token of rank {rank}", name)
        while not store.check([f"{name}/name"]):
            wait()
        name = store.get(f"{name}/name").decode()
        store.add(f"{name}/came", 1)
    return dist.PrefixStore(name, store)
