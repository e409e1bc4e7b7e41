"""Long work that each rank does for itself, and at the end of which all go on together.

No collective waits meanwhile, so none times out however long one node's disk takes; and an error on one rank is an
error on all within seconds, with the same message, though the others are in the middle of their work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TypeVar

from trimegatron.background import Task
from trimegatron.errors import CheckpointError, ConfigError, DataError, StoppedError, UserError
from trimegatron.mesh import Mesh
from trimegatron.store import RunStore

T = TypeVar("T")
POLL_SECONDS = 0.2
REMIND_SECONDS = 60.0
FAREWELL_SECONDS = 10.0
_KINDS: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (ConfigError, DataError, CheckpointError, StoppedError)
}


def on_every_rank(mesh: Mesh, work: Callable[[], T], *, what: str, say: Callable[[str], None]) -> T:
    """``work()``'s result, once every rank has its own.

    Args:
        mesh: the ranks; alone, this is ``work()``.
        work: takes no part in any communication. It runs in a thread, this one watches the others.
        what: names the work, once in a run.
        say: prints a line on the first rank, when some are waited for.

    Raises:
        UserError: the first one that any rank met.
        RuntimeError: another rank has failed at something else.
    """
    if mesh.store is None or mesh.world.size == 1:
        return work()
    return _Vigil(mesh, mesh.store, what, say).run(Task(work))


class _Vigil:
    """One rank's watch over its own work and the others', through the store alone."""

    def __init__(self, mesh: Mesh, store: RunStore, what: str, say: Callable[[str], None]) -> None:
        self.mesh, self.store, self.what, self.say = mesh, store, what, say
        self.rank, self.size = mesh.world.rank, mesh.world.size
        self.key = f"trimegatron/together/{what}"
        self.has_left = False

    def run(self, task: Task[T]) -> T:
        task.start()
        try:
            return self._watch(task)
        except StoppedError as error:  # a signal met this thread
            self._fail(error)
            raise

    def _watch(self, task: Task[T]) -> T:
        is_done, started = False, time.monotonic()
        reminded = started
        while self.store.add(f"{self.key}/done", 0) < self.size:
            self._check_others()
            if not is_done and not task.is_alive():
                is_done = True
                if task.error is not None:
                    self._fail(task.error)
                self.store.set(f"{self.key}/rank{self.rank}", "")
                self.store.add(f"{self.key}/done", 1)
                continue
            if self.rank == 0 and time.monotonic() - reminded > REMIND_SECONDS:
                reminded = time.monotonic()
                missing = [str(r) for r in range(self.size) if not self.store.check([f"{self.key}/rank{r}"])]
                self.say(f"{self.what}: waiting for rank {', '.join(missing[:8])} since {reminded - started:.0f} s")
            task.join(POLL_SECONDS) if not is_done else time.sleep(POLL_SECONDS)
        self._leave()
        return task.result[0]

    def _fail(self, error: BaseException) -> None:
        """Tell the others, and raise."""
        if isinstance(error, UserError):
            kind, text = type(error).__name__, str(error)
        else:
            kind, text = "DataError", f"{self.what}: rank {self.rank}: {type(error).__name__}: {error}"
        if self.store.add(f"{self.key}/failed", 1) == 1:
            self.store.set(f"{self.key}/error", json.dumps([kind, text]))
        self._leave()
        self._linger()
        raise error

    def _check_others(self) -> None:
        if not self.store.check([f"{self.key}/error"]):
            if self.store.failure_code() is not None:
                raise RuntimeError("another rank has failed elsewhere")
            return
        kind, text = json.loads(self.store.get(f"{self.key}/error"))
        self._leave()
        self._linger()
        raise _KINDS.get(kind, DataError)(text)

    def _leave(self) -> None:
        """Rank 0 goes last: it may hold the store, and with it gone the others could not even see that all are done."""
        if self.has_left:
            return
        self.has_left = True
        if self.rank > 0:
            self.store.add(f"{self.key}/left", 1)
            return
        end = time.monotonic() + FAREWELL_SECONDS
        while self.store.add(f"{self.key}/left", 0) < self.size - 1 and time.monotonic() < end:
            time.sleep(POLL_SECONDS / 20)

    def _linger(self) -> None:
        """After an error rank 0 lets the others ask the store whose turn it is to speak, before it goes."""
        if self.rank == 0:
            time.sleep(POLL_SECONDS)
