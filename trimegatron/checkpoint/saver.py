"""Saves: of a moment of the run, by all ranks together, while training waits or (``--async-save``) beside it.

An error on one rank is an error on all, at the same place, so that the run can go on. Until a checkpoint is whole it
has a temporary name; what was saved before is touched only when the new one is verified.
"""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from trimegatron.activity import Activity
from trimegatron.checkpoint.directory import (
    MARK,
    TOKENIZER,
    change_since,
    checkpoint_folder,
    clear_leftovers,
    flush_files,
    outdated,
    publish,
    remove,
    temporary_folder,
)
from trimegatron.checkpoint.snapshot import Snapshot
from trimegatron.checkpoint.storage import save_pieces
from trimegatron.config import Config
from trimegatron.errors import CheckpointError, ConfigError
from trimegatron.mesh import Mesh
from trimegatron.tokenizer import Tokenizer

T = TypeVar("T")
Ask = Callable[[], list[float]]
"""What a rank wants the others to know when a save is over (``stopping.py``)."""
SMALL_FILES = 32 * 2**20
"""Bytes allowed for what is not a tensor: the tokenizer, the state, the manifest, headers."""


def check_is_shared(root: Path, mesh: Mesh) -> None:
    """Every rank must see the folder that checkpoints go to: each writes a part of all of them.

    The first rank leaves a file there, of a name that no node has asked for before: a network's disk answers truly.

    Raises:
        ConfigError: some ranks see another folder.
    """
    if mesh.world.size == 1:
        return
    mark = f"{MARK}{uuid.uuid4().hex}"
    if mesh.is_first_rank:
        root.mkdir(parents=True, exist_ok=True)
        (root / mark).touch()
    seen = root / mesh.gather(mark)[0]
    others = [rank for rank, sees in enumerate(mesh.gather(seen.exists())) if not sees]
    if mesh.is_first_rank:
        seen.unlink()
    if others:
        raise ConfigError(
            f"--save ({root}) must be one folder for all ranks, each of which writes a part of every checkpoint; "
            f"{len(others)} of {mesh.world.size}, the first of them rank {others[0]}, see another one than rank 0. "
            "Give a folder of a file system that the nodes share"
        )


class Saver:
    """Writes a run's checkpoints into ``--save``, one at a time. Every rank calls every method at the same place."""

    def __init__(
        self, config: Config, *, tokenizer: Tokenizer, mesh: Mesh, activity: Activity, say: Callable[[str], None]
    ):
        self.options = config.checkpoint
        self.root = Path(config.checkpoint.save or "")
        self.tokenizer, self.mesh, self.activity, self.say = tokenizer, mesh, activity, say
        self.is_async = config.checkpoint.async_save
        self.axis = mesh.saving if self.is_async else mesh.world
        self.saved_at: int | None = None
        """Iteration of the newest save that has succeeded, or is being written."""
        self._host: dict[str, torch.Tensor] = {}
        """What saves beside training copy to, one after the other, by piece: writing to memory for the first time takes
        4 to 20 times as long."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def reserve(self, snapshot: Snapshot) -> None:
        """Take the host's memory for saves beside training, so that the first of them is as short as the others, and
        that it is there."""
        self.activity.note("reserving memory for saves")
        snapshot.on_host(self._host)

    def save(self, snapshot: Snapshot, *, ask: Ask = list, must_succeed: bool = False) -> list[float]:
        """Write a checkpoint, or begin to.

        Args:
            ask: each rank's question of others, when the checkpoint is whole.
            must_succeed: do not go on without it, and wait for it.

        Returns:
            The sums of what the ranks asked; nothing where training does not wait for the end.

        Raises:
            CheckpointError: it cannot be written, or the one before could not, and the run is not to go on.
        """
        self.wait()
        self.saved_at = snapshot.iteration
        answers: list[list[float]] = []
        if self.is_async:
            self.activity.note("copying what is saved")
            self._thread = threading.Thread(
                target=self._write_beside, args=(snapshot.on_host(self._host),), daemon=True
            )
            self._thread.start()
        else:
            try:
                answers = self._write(snapshot, ask)
            except CheckpointError as error:
                self._error = error
        if must_succeed or not self.is_async:
            self.wait(must_succeed=must_succeed)
        return [sum(values) for values in zip(*answers, strict=True)]

    def has_failed(self) -> bool:
        """Whether a save beside training has failed on this rank, and the run is to stop for it."""
        return self._error is not None and not self._goes_on_after(self._error)

    def wait(self, *, must_succeed: bool = False) -> None:
        """Wait until nothing is being written; a failure is said once.

        Raises:
            CheckpointError: it failed, and the run is not to go on.
        """
        if self._thread is not None:
            self.activity.note("waiting for the save before")
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return
        self.saved_at = None
        if must_succeed or not self._goes_on_after(error):
            raise error
        if not self.is_async:
            self.say(f"{error}. The run goes on (--on-save-error continue)")

    def _goes_on_after(self, error: BaseException) -> bool:
        """Whether the run does without the checkpoint; not after a fault of ours."""
        return self.options.on_save_error == "continue" and isinstance(error, CheckpointError)

    def _write_beside(self, snapshot: Snapshot) -> None:
        """:meth:`_write` in a thread."""
        try:
            self._write(snapshot, list)
        except BaseException as error:
            self._error = error
            if self._goes_on_after(error):
                self.say(f"{error}. The run goes on (--on-save-error continue)")

    def _write(self, snapshot: Snapshot, ask: Ask) -> list[list[float]]:
        """One checkpoint, from the room for it to the removal of old ones; what each rank asked at the end."""
        started = time.perf_counter()
        final, temporary = (name(self.root, snapshot.iteration) for name in (checkpoint_folder, temporary_folder))
        try:
            self._note("preparing to save")
            self._make_room(snapshot, temporary)
            self._note("writing a checkpoint")
            shard = save_pieces(temporary, snapshot.pieces, rank=self.mesh.world.rank, group=self.axis.group)
            self._note("flushing a checkpoint")
            # Each rank reads its own file once more for the hash, so that none waits long for another.
            mine = self._together(lambda: flush_files(temporary, [shard] if shard.exists() else []))
            entries = {name: entry for part in mine for name, entry in part.items()}
            self._note("publishing a checkpoint")
            self._together(lambda: self._finish(snapshot, temporary, final, entries))
            answers = self.mesh.gather(ask(), self.axis)
            seconds = time.perf_counter() - started
            self.say(f"saved {final} in {seconds:.1f} s{' beside training' if self.is_async else ''}")
            if self.options.num_kept is not None:
                self._note("removing old checkpoints")
                self._remove_old(final, mine[self.mesh.world.rank])
            return answers
        except OSError as error:
            if self.mesh.is_first_rank:  # every rank has stopped writing: the room is free for the next one
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(
                f"{final} could not be saved: {error}. Earlier checkpoints are as they were; free space or mend the "
                "folder, then resume with --load"
            ) from error

    def _note(self, phase: str) -> None:
        if not self.is_async:
            self.activity.note(phase)

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` gives on each rank, once all are done.

        Raises:
            OSError: one failed; on all ranks, so that none waits for another that has given up.
        """
        result: T | None = None
        problem: str | None = None
        try:
            result = work()
        except OSError as error:
            problem = str(error)
        outcomes = self.mesh.gather((result, problem), self.axis)
        for rank, (_, problem) in enumerate(outcomes):
            if problem is not None:
                raise OSError(f"rank {rank}: {problem}" if len(outcomes) > 1 else problem)
        return [result for result, _ in outcomes]

    def _make_room(self, snapshot: Snapshot, temporary: Path) -> None:
        """An empty temporary folder, on a disk that has room for all that the ranks will write."""
        needed = SMALL_FILES + sum(self.mesh.gather(snapshot.num_bytes, self.axis))

        def make_room() -> None:
            if not self.mesh.is_first_rank:
                return
            self.root.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.root)
            free = shutil.disk_usage(self.root).free
            if free < needed:
                raise OSError(f"it needs {needed / 1e9:.2f} GB and {self.root} has {free / 1e9:.2f} GB free")
            temporary.mkdir()

        self._together(make_room)

    def _finish(self, snapshot: Snapshot, temporary: Path, final: Path, entries: dict[str, dict[str, Any]]) -> None:
        """The first rank writes what is no tensor, and gives the folder its name."""
        if self.mesh.is_first_rank:
            snapshot.state.write(temporary)
            self.tokenizer.save(temporary / TOKENIZER)
            rest = [path for path in temporary.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
            publish(temporary, final, entries | flush_files(temporary, rest))

    def _remove_old(self, final: Path, mine: dict[str, dict[str, Any]]) -> None:
        """Read back what was just written; if it is all there, what is no longer kept goes."""

        def verify() -> None:
            change = change_since(final, mine)
            if change is not None:
                raise OSError(f"{change}; older checkpoints are kept")

        def remove_outdated() -> None:
            assert self.options.num_kept is not None
            if self.mesh.is_first_rank:
                for folder in outdated(final, self.options.num_kept, self.options.save_retain_interval):
                    remove(folder)

        self._together(verify)
        self._together(remove_outdated)
