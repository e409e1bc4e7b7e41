"""Reading and writing a ``.bin``/``.idx`` pair (``index_format.py`` has the layout).

S: sequences; D: documents + 1.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from trimegatron.data.index_format import HEADER_BYTES, Header, bin_path, idx_path
from trimegatron.errors import DataError
from trimegatron.files import sync_folder

_INDEX_CHUNK = 1 << 20  # entries converted at a time when an index is written
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 16, 1 << 16


class IndexedDataset:
    """The tokens of a ``.bin``/``.idx`` pair, memory-mapped: any number of processes share one copy in the page cache.

    Args:
        prefix: the path without ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is missing, or the two do not belong together.
    """

    prefix: Path
    dtype: np.dtype
    sizes: np.ndarray  # int32 [S]: tokens in each sequence
    pointers: np.ndarray  # int64 [S]: byte offset of each sequence in .bin
    document_indices: np.ndarray  # int64 [D]: sequences before each document, and S
    tokens: np.ndarray  # dtype [all tokens]

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        index, tokens = idx_path(prefix), bin_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; --data-path takes the path without .bin and .idx{_nearby(path)}"
                )
        header = Header.read(index)
        if index.stat().st_size != header.file_bytes:
            raise DataError(
                f"{index}: {index.stat().st_size} bytes, but {header.num_sequences} sequences and "
                f"{header.num_document_entries} document entries take {header.file_bytes}; "
                "the file is cut short, or of a kind that is not supported (multimodal)"
            )
        mapped = np.memmap(index, mode="r", dtype=np.uint8)
        n, d = header.num_sequences, header.num_document_entries
        self.dtype = header.dtype
        self.sizes = np.frombuffer(mapped, "<i4", n, HEADER_BYTES)
        self.pointers = np.frombuffer(mapped, "<i8", n, HEADER_BYTES + 4 * n)
        self.document_indices = np.frombuffer(mapped, "<i8", d, HEADER_BYTES + 12 * n)
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))
        self._check(index, tokens)
        # numpy cannot map an empty file; the plain-array view spares every slice the memmap subclass's overhead.
        self.tokens = (
            np.memmap(tokens, self.dtype, "r").view(np.ndarray) if self.num_tokens else np.empty(0, self.dtype)
        )

    def _check(self, index: Path, tokens: Path) -> None:
        expected, actual = self.num_tokens * self.dtype.itemsize, tokens.stat().st_size
        if actual != expected:
            raise DataError(
                f"{tokens}: {actual} bytes, but {index} describes {self.num_tokens} tokens of {self.dtype.itemsize} "
                f"bytes = {expected}; the two files do not belong together, or one is cut short: preprocess again"
            )
        bounds = self.document_indices[[0, -1]].tolist() if len(self.document_indices) else None
        if bounds != [0, len(self.sizes)]:
            raise DataError(
                f"{index}: the document array runs over {bounds}, not [0, {len(self.sizes)}]; preprocess again"
            )
        if len(self) and (
            self.sizes.min() < 0 or self.pointers[-1] + int(self.sizes[-1]) * self.dtype.itemsize != expected
        ):
            raise DataError(f"{index}: sequence lengths and offsets disagree; preprocess again")

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path]]:
        # A worker process maps the files itself; pickling a memory map would send all the tokens.
        return IndexedDataset, (self.prefix,)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence (to its end without ``length``), as a view of the file."""
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"sequence {index} of {len(self.sizes)}")
        size = int(self.sizes[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens [{offset}, {stop}) of sequence {index}, which has {size}")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.tokens[start + offset : start + stop]

    def starts_of(self, sequences: np.ndarray) -> np.ndarray:
        """int64: the place in ``tokens`` where each of ``sequences`` begins."""
        return self.pointers[sequences] // self.dtype.itemsize

    def fingerprint(self) -> str:
        """A sha256 that tells this data from other data, the same wherever the pair is copied.

        It covers the whole index (type, lengths, documents), the size of ``.bin`` and 16 blocks of 64 KiB spread over
        it.
        """
        with idx_path(self.prefix).open("rb") as index:
            digest = hashlib.file_digest(index, "sha256")
        size = self.num_tokens * self.dtype.itemsize
        digest.update(size.to_bytes(8, "little"))
        with bin_path(self.prefix).open("rb") as tokens:
            for k in range(_SAMPLED_BLOCKS):
                tokens.seek(max(0, size - _SAMPLED_BYTES) * k // (_SAMPLED_BLOCKS - 1))
                digest.update(tokens.read(_SAMPLED_BYTES))
        return digest.hexdigest()


def _nearby(path: Path) -> str:
    """' (here: a, b)': the prefixes of the same folder, for whoever mistyped one."""
    found = sorted(p.stem for p in path.parent.glob("*.idx"))[:5] if path.parent.is_dir() else []
    return f" (in that folder: {', '.join(found)})" if found else ""


class IndexedDatasetWriter:
    """Writes a pair, which appears whole or not at all.

    Tokens go straight to a temporary file beside the target; in memory are 4 bytes a sequence and 8 a document. As a
    context manager it finishes on success and leaves nothing after an exception.

    Args:
        prefix: the path without ``.bin`` and ``.idx``; its folder must exist.
        dtype: the token type on disk, see ``best_dtype``.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | str) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self._sizes = array("i")
        self._documents = array("q", [0])
        self._temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in self._targets()}
        self._file: BinaryIO = self._temporary[bin_path(prefix)].open("wb")

    def _targets(self) -> tuple[Path, Path]:
        return bin_path(self.prefix), idx_path(self.prefix)

    @property
    def num_documents(self) -> int:
        """Documents added so far, empty ones included."""
        return len(self._documents) - 1

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
        self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        self.num_tokens += ids.size
        self._sizes.frombytes(sizes.tobytes())
        self._documents.frombytes((counts.cumsum() + self._documents[-1]).tobytes())

    def finish(self) -> None:
        """Write the index and put both files in their places, replacing what was there."""
        tokens, index = self._targets()
        _sync_and_close(self._file)
        with self._temporary[index].open("wb") as file:
            self._write_index(file)
            _sync_and_close(file)
        # The index makes the pair valid, so an old one goes first: at no moment do files of two runs stand together.
        index.unlink(missing_ok=True)
        self._temporary[tokens].replace(tokens)
        self._temporary[index].replace(index)
        sync_folder(index.parent)

    def _write_index(self, file: BinaryIO) -> None:
        file.write(Header(self.dtype, len(self._sizes), len(self._documents)).pack())
        sizes = np.frombuffer(self._sizes, "<i4") if self._sizes else np.empty(0, "<i4")
        file.write(sizes.data)
        position = 0
        for start in range(0, len(sizes), _INDEX_CHUNK):
            ends = position + sizes[start : start + _INDEX_CHUNK].cumsum(dtype=np.int64) * self.dtype.itemsize
            file.write(np.concatenate(([position], ends[:-1])).astype("<i8").data)
            position = int(ends[-1])
        file.write(np.frombuffer(self._documents, "<i8").data)

    def abort(self) -> None:
        """Remove the temporary files; what stood under the final names stays."""
        self._file.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

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


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
