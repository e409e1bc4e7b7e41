"""Reading and writing a ``.bin``/``.idx`` pair (``index_format.py`` and ``legacy_format.py`` have the layouts).

S: sequences; D: documents + 1.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trimegatron.data.index_format import HEADER_BYTES, MAGIC_LAZY, Header, bin_path, idx_path
from trimegatron.data.legacy_format import LegacyHeader
from trimegatron.errors import DataError
from trimegatron.files import sync_folder

_INDEX_CHUNK = 1 << 20  # entries converted at a time when an index is written
_SAMPLED_BLOCKS, _SAMPLED_BYTES = 16, 1 << 16


class Index(NamedTuple):
    """What an ``.idx`` says, mapped from it."""

    dtype: np.dtype
    sizes: np.ndarray  # int32 [S]
    starts: np.ndarray  # int64 [S]: where each sequence begins in .bin, in units of ``unit`` bytes
    unit: int
    documents: np.ndarray  # int64 [D]

    @classmethod
    def read(cls, path: Path) -> Index:
        """Map either kind of index; which one it is, the file says. Raises DataError."""
        with path.open("rb") as file:
            is_legacy = file.read(len(MAGIC_LAZY)) == MAGIC_LAZY
        header: Header | LegacyHeader = LegacyHeader.read(path) if is_legacy else Header.read(path)
        if path.stat().st_size != header.file_bytes:
            raise DataError(
                f"{path}: {path.stat().st_size} bytes, but {header.num_sequences} sequences and "
                f"{header.num_document_entries} document entries take {header.file_bytes}; "
                "the file is cut short, or of a kind that is not supported (multimodal)"
            )
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        n, d = header.num_sequences, header.num_document_entries
        if isinstance(header, LegacyHeader):
            # int64 on disk; a sequence of 2^31 tokens could not be a sample's neighbour in Megatron either.
            sizes = np.frombuffer(mapped, "<i8", n, header.sizes_at)
            if n and not 0 <= sizes.min() <= sizes.max() <= np.iinfo(np.int32).max:
                raise DataError(f"{path}: sequences of {sizes.min()} to {sizes.max()} tokens; preprocess again")
            starts = np.frombuffer(mapped, "<i8", n, header.offsets_at)
            documents = np.frombuffer(mapped, "<i8", d, header.documents_at)
            return cls(header.dtype, sizes.astype(np.int32), starts, header.dtype.itemsize, documents)
        sizes = np.frombuffer(mapped, "<i4", n, HEADER_BYTES)
        starts = np.frombuffer(mapped, "<i8", n, HEADER_BYTES + 4 * n)
        return cls(header.dtype, sizes, starts, 1, np.frombuffer(mapped, "<i8", d, HEADER_BYTES + 12 * n))


class IndexedDataset:
    """The tokens of a ``.bin``/``.idx`` pair, written with any ``--dataset-impl``.

    Args:
        prefix: the path without ``.bin`` and ``.idx``.
        impl: how tokens are read (``--data-impl``); what is read is the same. ``mmap`` and ``infer``: from a memory
            map; any number of processes share one copy in the page cache, which the kernel counts as theirs while it
            has room. ``lazy``: read from the file when asked for, memory stays flat. ``cached``: all in memory from the
            start; processes forked later share it.

    Raises:
        DataError: a file is missing, or the two do not belong together.
    """

    prefix: Path
    dtype: np.dtype
    sizes: np.ndarray  # int32 [S]: tokens in each sequence
    document_indices: np.ndarray  # int64 [D]: sequences before each document, and S
    tokens: np.ndarray | None  # dtype [all tokens]; None with ``lazy``

    def __init__(self, prefix: str | Path, impl: str = "infer") -> None:
        assert impl in ("infer", "mmap", "lazy", "cached")
        self.prefix, self.impl = Path(prefix), impl
        index, tokens = idx_path(prefix), bin_path(prefix)
        for path in (index, tokens):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file; --data-path takes the path without .bin and .idx{_nearby(path)}"
                )
        self.dtype, self.sizes, self._starts, unit, self.document_indices = Index.read(index)
        self._starts_per_token = self.dtype.itemsize // unit
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))
        self._check(index, tokens)
        self._fingerprint: str | None = None
        self._file = tokens.open("rb") if impl == "lazy" else None
        self.tokens = self._load(tokens) if impl != "lazy" else None

    def _load(self, path: Path) -> np.ndarray:
        if self.impl == "cached":
            return np.fromfile(path, self.dtype)
        # numpy cannot map an empty file; the plain-array view spares every slice the memmap subclass's overhead.
        return np.memmap(path, self.dtype, "r").view(np.ndarray) if self.num_tokens else np.empty(0, self.dtype)

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
            self.sizes.min() < 0 or self._starts[-1] // self._starts_per_token + int(self.sizes[-1]) != self.num_tokens
        ):
            raise DataError(f"{index}: sequence lengths and offsets disagree; preprocess again")

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[Path, str]]:
        # A worker process maps the files itself; pickling a memory map would send all the tokens.
        return IndexedDataset, (self.prefix, self.impl)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of a sequence (to its end without ``length``); without a copy unless
        ``lazy``.
        """
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"sequence {index} of {len(self.sizes)}")
        size = int(self.sizes[index])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens [{offset}, {stop}) of sequence {index}, which has {size}")
        start = int(self._starts[index]) // self._starts_per_token
        if self.tokens is not None:
            return self.tokens[start + offset : start + stop]
        return self._read(start + offset, stop - offset)

    def starts_of(self, sequences: np.ndarray) -> np.ndarray:
        """int64: the place in ``tokens`` where each of ``sequences`` begins."""
        return self._starts[sequences] // self._starts_per_token

    def _read(self, start: int, length: int) -> np.ndarray:
        """Tokens from the file itself. ``pread`` has no position to share: forked processes may use one descriptor."""
        assert self._file is not None
        itemsize = self.dtype.itemsize
        found = np.empty(length, self.dtype)
        view, done = found.view(np.uint8), 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done:].data], start * itemsize + done)
            if count == 0:
                raise DataError(f"{bin_path(self.prefix)}: ends at byte {start * itemsize + done}; it was whole before")
            done += count
        return found

    def fingerprint(self) -> str:
        """A sha256 that tells this data from other data, the same wherever the pair is copied.

        It covers the whole index (type, lengths, documents), the size of ``.bin`` and 16 blocks of 64 KiB spread over
        it.
        """
        if self._fingerprint is None:
            self._fingerprint = self._hash()
        return self._fingerprint

    def _hash(self) -> str:
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
