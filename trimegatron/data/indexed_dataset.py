"""Reading a ``.bin``/``.idx`` pair, in any of the three formats.

``index_format.py`` and ``legacy_format.py`` have the layouts, ``indexed_writer.py`` writes.
S: sequences; D: documents + 1.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimegatron.data.index_format import HEADER_BYTES, MAGIC_LAZY, Header, bin_path, idx_path
from trimegatron.data.legacy_format import LegacyHeader
from trimegatron.errors import DataError

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
