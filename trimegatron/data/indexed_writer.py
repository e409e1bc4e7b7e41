"""Writing a ``.bin``/``.idx`` pair in any of Megatron-LM's formats (``index_format.py``, ``legacy_format.py``).

Nothing grows with the data: tokens, lengths and document ends go to three files in a working folder, from which the
index is put together in the end. S: sequences; D: documents + 1.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trimegatron.data.index_format import Header, bin_path, idx_path
from trimegatron.data.legacy_format import LegacyHeader
from trimegatron.data.metadata import meta_path, pack_metadata
from trimegatron.errors import DataError
from trimegatron.files import sync_folder

DATASET_IMPLS = ("mmap", "lazy", "cached")
_CHUNK = 1 << 18  # entries held while an index is put together
_SPOOLS = ("bin", "sizes", "documents")


class Written(NamedTuple):
    """How much a writer has taken: enough to go on from."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


class IndexedDatasetWriter:
    """Writes a pair, which appears whole or not at all.

    As a context manager it finishes on success and leaves nothing after an exception.

    Args:
        prefix: the path without ``.bin`` and ``.idx``; its folder must exist.
        dtype: the token type on disk, see ``best_dtype``.
        impl: ``mmap``, or ``lazy`` or ``cached``, which are written alike.
        folder: an existing working folder on the same disk, which is the caller's to remove; a temporary one beside
            the target when not given.
        metadata: of ``.meta.json``; there is none without.
        at: go on from here, in a ``folder`` that was left behind; what lies there beyond it is cut off.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | str,
        impl: str = "mmap",
        *,
        metadata: dict[str, Any] | None = None,
        folder: Path | None = None,
        at: Written | None = None,
    ) -> None:
        self.prefix, self.impl, self.metadata = Path(prefix), impl, metadata
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._owned = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(dir=self.prefix.parent, prefix=f".{self.prefix.name}."))
        self.written = at or Written()
        ends = (self.written.tokens * self.dtype.itemsize, self.written.sequences * 4, self.written.documents * 8)
        self._files: dict[str, BinaryIO] = {}
        for kind, end in zip(_SPOOLS, ends, strict=True):
            file = self._path(kind).open("wb" if at is None else "r+b")
            self._files[kind] = file
            file.truncate(end)
            file.seek(end)

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.prefix.name}.{kind}"

    def add_document(self, tokens: ArrayLike, lengths: ArrayLike) -> None:
        """Append one document: its ``tokens``, and the ``lengths`` of its sequences (none for an empty document)."""
        self.add_documents(tokens, lengths, [np.size(lengths)])

    def add_documents(self, tokens: ArrayLike, lengths: ArrayLike, sequences: ArrayLike) -> None:
        """Append many documents at once.

        Args:
            tokens: all their tokens in order.
            lengths: tokens of each sequence.
            sequences: sequences of each document.
        """
        ids, sizes, counts = np.asarray(tokens), np.asarray(lengths, "<i4"), np.asarray(sequences, "<i8")
        assert sizes.sum(dtype=np.int64) == ids.size and counts.sum() == sizes.size
        if ids.dtype != self.dtype and ids.size:
            limits = np.iinfo(self.dtype)
            if ids.min() < limits.min or ids.max() > limits.max:
                raise DataError(f"{self.prefix}: token ids {ids.min()}..{ids.max()} do not fit {self.dtype.name}")
        done = self.written
        self._files["bin"].write(np.ascontiguousarray(ids, self.dtype).data)
        self._files["sizes"].write(np.ascontiguousarray(sizes).data)
        self._files["documents"].write((counts.cumsum() + done.sequences).astype("<i8").data)
        self.written = Written(done.tokens + ids.size, done.sequences + sizes.size, done.documents + counts.size)

    def sync(self) -> Written:
        """Flush everything to the disk; returns what a later writer can go on from."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return self.written

    def finish(self) -> None:
        """Write the index (and the metadata) and put the files in their places, replacing what was there."""
        self.prepare()
        publish(self.folder, self.prefix)
        if self._owned:
            shutil.rmtree(self.folder)

    def prepare(self) -> None:
        """Complete the files in the working folder; ``publish`` puts them in their places.

        Nothing is removed: until the caller has noted it, all this can be done again.
        """
        self.sync()
        with self._path("idx").open("wb") as index:
            (self._write_mmap_index if self.impl == "mmap" else self._write_legacy_index)(index)
            index.flush()
            os.fsync(index.fileno())
        if self.metadata is not None:
            self._path("meta.json").write_text(pack_metadata(self.metadata), "utf-8")
        for file in self._files.values():
            file.close()

    def _write_mmap_index(self, file: BinaryIO) -> None:
        file.write(Header(self.dtype, self.written.sequences, self.written.documents + 1).pack())
        self._copy("sizes", "<i4", file)
        for start in self._starts():
            file.write((start[:-1] * self.dtype.itemsize).data)
        file.write(bytes(8))
        self._copy("documents", "<i8", file)

    def _write_legacy_index(self, file: BinaryIO) -> None:
        n = self.written.sequences
        file.write(LegacyHeader(self.dtype, n, self.written.documents + 1).pack())
        for k in range(0, n + 1, _CHUNK):
            file.write(np.arange(k, min(n + 1, k + _CHUNK), dtype="<i8").data)
        file.write(bytes(8))
        for start in self._starts():
            file.write(np.ascontiguousarray(start[1:]).data)
        self._copy("sizes", "<i4", file, lambda sizes: sizes.astype("<i8"))
        file.write(bytes(8))
        self._copy("documents", "<i8", file)

    def _starts(self) -> Iterator[np.ndarray]:
        """Token offsets of the sequences, int64, a block at a time: of k sequences k + 1, the last being the end."""
        position = 0
        for sizes in _read(self._path("sizes"), "<i4"):
            offsets = np.concatenate(([0], sizes.cumsum(dtype="<i8"))) + position
            yield offsets
            position = int(offsets[-1])

    def _copy(
        self, kind: str, dtype: str, file: BinaryIO, convert: Callable[[np.ndarray], np.ndarray] = lambda a: a
    ) -> None:
        for values in _read(self._path(kind), dtype):
            file.write(convert(values).data)

    def abort(self) -> None:
        """Close; remove the working folder if it is ours. What stood under the final names stays."""
        for file in self._files.values():
            file.close()
        if self._owned:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            try:
                self.finish()
                return
            except BaseException:
                self.abort()
                raise
        self.abort()


def publish(folder: Path, prefix: Path) -> None:
    """Move what ``prepare`` completed in ``folder`` to its places. Called again after an interruption, it goes on."""
    tokens, index, meta = (folder / f"{prefix.name}.{kind}" for kind in ("bin", "idx", "meta.json"))
    # The index makes the pair valid, so an old one goes first: at no moment do files of two runs stand together.
    if tokens.exists():
        idx_path(prefix).unlink(missing_ok=True)
        meta_path(prefix).unlink(missing_ok=True)
        tokens.replace(bin_path(prefix))
    if meta.exists():
        meta.replace(meta_path(prefix))
    if index.exists():
        index.replace(idx_path(prefix))
    sync_folder(prefix.parent)


def _read(path: Path, dtype: str) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while len(values := np.fromfile(file, dtype, _CHUNK)):
            yield values
