"""Index maps on disk: built once however many processes ask, and never answering for other data.

Beside each other in one folder lie, per key, the ``.npy`` files, ``KEY-…-description.json`` (written last: what the
key stands for, and the sha256 of each array) and ``KEY.lock``. The key is the sha256 of the description. Processes
that need the same maps at the same time meet at the lock, which the kernel releases when its holder dies: no
collective, hence no collective's time-out. Where the file system has no locks, each builds for itself; what they
write is the same.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np

from trimegatron.data.indices import Chunks
from trimegatron.errors import DataError

Log = Callable[[str], None]
FORMAT = 2  # count up when the files or the algorithms change
_HOST = platform.node().replace("/", "_") or "host"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

Maps = TypeVar("Maps", bound=tuple[np.ndarray, ...])


class IndexCache(Generic[Maps]):
    """A few arrays in one folder.

    Args:
        folder: where the files go; made when missing.
        name: goes into the file names, such as ``GPTDataset-train``.
        kind: the named tuple of the arrays.
        description: everything the arrays depend on, JSON-ready.
        log: takes a line when something is waited for, broken or rebuilt.
    """

    def __init__(self, folder: Path, name: str, kind: type[Maps], description: dict[str, Any], log: Log) -> None:
        self.folder, self.kind, self.log = folder, kind, log
        self.description = {"format": FORMAT, "name": name, **description}
        self.key = hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()
        self._stem = f"{self.key[:32]}-{name}"
        self.files = tuple(folder / f"{self._stem}-{field}.npy" for field in kind._fields)  # type: ignore[attr-defined]
        self.description_file = folder / f"{self._stem}-description.json"
        self.lock_file = folder / f"{self._stem}.lock"

    def load_or_build(self, build: Callable[[], Iterable[np.ndarray | Chunks]]) -> Maps:
        """The maps, memory-mapped: from disk, or from ``build`` in one process while the others wait for its files.

        ``build`` gives the arrays in the order of ``kind``'s fields; each is written and dropped before the next is
        asked for.

        Raises:
            DataError: the folder cannot be written; the message has the way out.
        """
        found = self._load(report=False)
        if found is not None:
            return found
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked() as is_alone:
                found = self._load(report=True)  # another process may have built them while this one waited
                if found is None:
                    self._save(build(), alone=is_alone)
                    found = self._load(report=True)
        except OSError as error:
            raise DataError(
                f"{self.folder}: cannot keep the index maps there ({error.strerror or error}); "
                "give a folder that can be written with --data-cache-path"
            ) from error
        if found is None:
            raise DataError(f"{self.folder}: the index maps just written do not read back; is the disk sound?")
        return found

    def _load(self, report: bool) -> Maps | None:
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
        return self.kind(*arrays)

    def _broken(self, path: Path, reason: str, report: bool) -> None:
        if report:
            self.log(f"{path}: broken ({reason}); building the index maps again")

    def _save(self, arrays: Iterable[np.ndarray | Chunks], *, alone: bool) -> None:
        if alone:
            for left_over in self.folder.glob(f".{self._stem}-*.{_HOST}-*.tmp"):  # of a builder that was killed here
                left_over.unlink(missing_ok=True)
        # The old description goes first, so that a reader never pairs it with new arrays.
        self.description_file.unlink(missing_ok=True)
        sums = {}
        parts = iter(arrays)
        for path in self.files:
            with _replacing(path) as file:
                sums[path.name] = _write_array(file, next(parts))
        assert next(parts, None) is None
        with _replacing(self.description_file) as file:
            file.write(json.dumps({**self.description, "sha256": sums}, indent=2).encode())

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock; False where there is none to hold."""
        is_alone = True
        with self.lock_file.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    self.log(f"process {os.getpid()} waits for another that builds the index maps ({self.lock_file})")
                    fcntl.flock(file, fcntl.LOCK_EX)
                elif error.errno in _NO_LOCKS:
                    is_alone = False
                    self.log(f"{self.folder}: this file system has no locks; every process builds its own index maps")
                else:
                    raise
            yield is_alone


def _write_array(file: BinaryIO, array: np.ndarray | Chunks) -> str:
    """Write in the format of ``np.save``; returns the sha256 of the bytes."""
    digest = hashlib.sha256()
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": array.dtype.str, "fortran_order": False, "shape": tuple(array.shape)}
    )
    parts = array.parts() if isinstance(array, Chunks) else [np.ascontiguousarray(array)]
    file.write(header.getbuffer())
    digest.update(header.getbuffer())
    rows = 0
    for part in parts:
        rows += len(part)
        data = part.reshape(-1).view(np.uint8).data
        file.write(data)
        digest.update(data)
    assert rows == array.shape[0]
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name ``path`` when it is whole and on disk, and leaves nothing otherwise."""
    # Not the process number alone: two nodes that share the folder may have the same one.
    temporary = path.with_name(f".{path.name}.{_HOST}-{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
