"""A thread beside each rank's training that knows when the run is over although this rank waits in a collective:
because another rank has failed, or because no rank goes on any more.

It costs a step nothing: each rank leaves word in the store now and then of where it is (``activity.py``).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimegatron.activity import Activity
from trimegatron.errors import complain
from trimegatron.mesh import Mesh
from trimegatron.store import RunStore, StoreLostError

LOOK = 1.0
"""Seconds between two looks for failures."""
PERIOD = 5.0
"""Seconds between two words of a rank; shorter where the limit is."""
GRACE = 10.0
"""Seconds that a rank has to end by itself when another has failed."""
HANGING = "trimegatron/watch/ranks that saw the hang"


@dataclass(frozen=True)
class Word:
    """What a rank last said of itself."""

    rank: int
    notes: int
    """How many phases it has entered; the fewest are behind."""
    activity: str
    place: str
    """Where in the program its main thread is."""
    beat: int = 0

    @property
    def waits(self) -> bool:
        """Whether it is in a collective: then it waits for the others."""
        return "torch/distributed" in self.place

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.activity}, at {self.place}"


class Watch:
    """Runs while it is entered. A single process has nobody to wait for: then it does nothing.

    Args:
        limit: seconds without a note on this rank that make a hang; 0: none does.
        folder: where a GPU's record of its last collectives goes.
    """

    def __init__(
        self,
        mesh: Mesh,
        activity: Activity,
        *,
        limit: float,
        folder: Path | None = None,
        end: Callable[[int], Any] = os._exit,
    ):
        self.mesh, self.activity, self.limit, self.end = mesh, activity, limit, end
        self.folder = folder or Path(tempfile.gettempdir())
        self.period = min(PERIOD, limit / 10) if limit > 0 else PERIOD
        self._main = threading.get_ident()
        self._is_over = threading.Event()
        self._beat = 0
        self._seen_notes = -1
        self._moved_at = time.monotonic()
        self._failed_at: float | None = None

    def __enter__(self) -> Watch:
        if self.mesh.store is not None and self.mesh.world.size > 1:
            store = self.mesh.store.clone(self.limit or self.mesh.store.seconds)
            threading.Thread(target=self._run, args=(store,), daemon=True, name="watch").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self, store: RunStore) -> None:
        spoke_at = -math.inf
        try:
            while not self._is_over.wait(min(LOOK, self.period)):
                self._look_for_failure(store)
                if time.monotonic() - spoke_at >= self.period:
                    spoke_at = time.monotonic()
                    self._say(store)
                if self.limit > 0 and time.monotonic() - self._moved_at > self.limit:
                    self._end_hang(store)
        except StoreLostError as lost:
            self._end_without_store(lost)

    def _end_without_store(self, lost: StoreLostError) -> None:
        """Nothing can be heard of the others any more. A closed connection means that its other end is gone: then this
        rank may end by itself, or is ending."""
        if lost.is_silent or not self._is_over.wait(GRACE):
            rank = f"rank {self.mesh.world.rank}, {self.activity}"
            complain("train", f"{rank}: {lost}; its machine is gone, or the network to it")
            self.end(1)

    def _say(self, store: RunStore) -> None:
        """Leave word of this rank."""
        if self.activity.notes != self._seen_notes:
            self._seen_notes, self._moved_at = self.activity.notes, time.monotonic()
        self._beat += 1
        word = Word(self.mesh.world.rank, self._seen_notes, str(self.activity), place_of(self._main), self._beat)
        store.set(_key(word.rank), json.dumps(asdict(word)))

    def _look_for_failure(self, store: RunStore) -> None:
        """A collective of a GPU does not break when a rank leaves it: end this rank if it has not ended by itself."""
        code = store.failure_code()
        if code is None:
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at > GRACE and not self._is_over.is_set():
            self.end(code)

    def _end_hang(self, store: RunStore) -> None:
        """Name the ranks that are behind, once, and end this one."""
        before = self._read(store)
        for _ in range(3):  # going on to speak: the others may be here as well, reading this rank's words
            self._is_over.wait(self.period)
            self._say(store)
        after = self._read(store)
        if self._is_over.is_set() or time.monotonic() - self._moved_at <= self.limit:
            return
        store.report_failure(1)
        if store.add(HANGING, 1) == 1:
            complain("train", describe_hang(before, after, self.limit))
        if self.mesh.device.type == "cuda":
            dump_flight_record(self.folder, self.mesh.world.rank)
        self._is_over.wait(self.period)  # the rank that holds the store leaves no earlier than the others have read
        self.end(1)

    def _read(self, store: RunStore) -> list[Word | None]:
        """Each rank's word; None of one that has left none yet."""
        keys = [_key(rank) for rank in range(self.mesh.world.size)]
        return [Word(**json.loads(store.get(key))) if store.check([key]) else None for key in keys]


def describe_hang(before: list[Word | None], after: list[Word | None], limit: float) -> str:
    """Who holds up the others, from two readings of all ranks' words between which each leaves at least one.

    A rank that has said nothing in between does not run at all. Else those are behind that have entered the fewest
    phases; and where all are in the same one, those that are not in a collective.
    """
    silent = [rank for rank, (one, two) in enumerate(zip(before, after, strict=True)) if two is None or one == two]
    words = [word for word in after if word is not None and word.rank not in silent]
    told = [
        f"rank {rank} does not run (stopped, or its machine is gone)"
        + (f"; its last word was {word.activity}, at {word.place}" if (word := after[rank]) is not None else "")
        for rank in silent
    ]
    if not told:
        fewest = min(word.notes for word in words)
        behind = [word for word in words if word.notes == fewest]
        if len(behind) == len(words):
            behind = [word for word in words if not word.waits] or words
        told = [str(word) for word in behind]
        words = [word for word in words if word not in behind]
    text = f"no rank has gone on for {limit:.0f} s (--hang-timeout-in-mins). Behind: {_few(told)}"
    return text + (f". Waiting: {_few([str(word) for word in words])}" if words else "")


def place_of(thread: int) -> str:
    """Where a thread of this process is: the innermost line of this package, and the innermost of all."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    places = [
        f"{_short(inner.f_code.co_filename)}:{line} {inner.f_code.co_name}"
        for inner, line in traceback.walk_stack(frame)
    ]
    ours = next((place for place in places if place.startswith("trimegatron/")), places[0])
    return ours if ours == places[0] else f"{ours} > {places[0]}"


def _short(filename: str) -> str:
    """From the package's name on."""
    for package in ("trimegatron/", "torch/"):
        if package in filename:
            return package + filename.rpartition(package)[2]
    return filename


def _few(items: list[str], most: int = 8) -> str:
    more = [f"{len(items) - most} more"] if len(items) > most else []
    return "; ".join(items[:most] + more)


def _key(rank: int) -> str:
    return f"trimegatron/watch/rank{rank}"


def prepare_flight_record() -> None:
    """Have NCCL's groups keep a record of their last collectives; before they are made. A user's setting holds."""
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")


def dump_flight_record(folder: Path, rank: int) -> None:
    """Write the record of this rank as JSON. Untested: it needs several GPUs."""
    import torch._C._distributed_c10d as c10d

    path = folder / f"nccl_flight_record_rank{rank}.json"
    try:
        path.write_bytes(c10d._dump_nccl_trace_json())  # type: ignore[attr-defined]
        print(f"rank {rank}: its last collectives are in {path}", file=sys.stderr, flush=True)
    except Exception as error:  # the run ends anyway, and has said why
        print(f"rank {rank}: NCCL's flight record is not to be had: {error}", file=sys.stderr, flush=True)
