"""Index maps on disk: built once however many processes ask, and never answering for other data.

Beside each other in one folder lie, per key, three ``.npy`` files, ``KEY-…-description.json`` (written last: what the
key stands for, and the sha256 of each array) and ``KEY.lock``. The key is the sha256 of the description. Processes
that need the same maps at the same time meet at the lock, which the kernel releases when its holder dies: no
collective, hence no collective's time-out.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trimegatron.data.indices import GPTIndices
from trimegatron.errors import DataError
from trimegatron.files import write_atomically

Log = Callable[[str], None]
FORMAT = 1  # count up when the files or the algorithms change


class IndexCache:
    """The maps of one split in one folder.

    Args:
        folder: where the files go; made when missing.
        name: goes into the file names, such as ``GPTDataset-train``.
        description: everything the arrays depend on, JSON-ready.
        log: takes a line when something is waited for, broken or rebuilt.
    """

    def __init__(self, folder: Path, name: str, description: dict[str, Any], log: Log) -> None:
        self.folder, self.log = folder, log
        self.description = {"format": FORMAT, "name": name, **description}
        self.key = hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()
        self._stem = f"{self.key[:32]}-{name}"
        self.files = tuple(folder / f"{self._stem}-{field}.npy" for field in GPTIndices._fields)
        self.description_file = folder / f"{self._stem}-description.json"
        self.lock_file = folder / f"{self._stem}.lock"

    def load_or_build(self, build: Callable[[], GPTIndices]) -> GPTIndices:
        """The maps, memory-mapped: from disk, or from ``build`` in one process while the others wait for its files."""
        found = self._load(report=False)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                found = self._load(report=True)  # another process may have built them while this one waited
                if found is None:
                    self._save(build())
                    found = self._load(report=True)
        except OSError as error:
            raise DataError(
                f"{self.folder}: cannot keep the index maps there ({error.strerror or error}); "
                "give a folder that can be written with --data-cache-path"
            ) from error
        if found is None:
            raise DataError(f"{self.folder}: the index maps just written do not read back; is the disk sound?")
        return found

    def _load(self, report: bool) -> GPTIndices | None:
        """The maps if they are there and whole. ``report``: say what is wrong with those that are not."""
        try:
            sums = json.loads(self.description_file.read_text("utf-8"))["sha256"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._broken(self.description_file, repr(error), report)
            return None
        arrays = []
        for path in self.files:
            try:
                with path.open("rb") as file:
                    actual = hashlib.file_digest(file, "sha256").hexdigest()
                if actual != sums[path.name]:
                    raise ValueError("its content is not what was written")
                arrays.append(np.load(path, mmap_mode="r").view(np.ndarray))
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._broken(path, repr(error), report)
                return None
        return GPTIndices(*arrays)

    def _broken(self, path: Path, reason: str, report: bool) -> None:
        if report:
            self.log(f"{path}: broken ({reason}); building the index maps again")

    def _save(self, indices: GPTIndices) -> None:
        # The old description goes first, so that a reader never pairs it with new arrays.
        self.description_file.unlink(missing_ok=True)
        sums = {}
        for path, values in zip(self.files, indices, strict=True):
            with _replacing(path) as file:
                np.save(file, values, allow_pickle=False)
            with path.open("rb") as written:
                sums[path.name] = hashlib.file_digest(written, "sha256").hexdigest()
        write_atomically(self.description_file, json.dumps({**self.description, "sha256": sums}, indent=2))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.lock_file.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                self.log(f"process {os.getpid()} waits for another one that builds the index maps ({self.lock_file})")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name ``path`` when it is whole and on disk, and leaves nothing otherwise."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
