"""Reading a ``.bin``/``.idx`` pair (``index_format.py`` has the layout, ``indexed_writer.py`` writes).

S: sequences; D: documents + 1.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from trimegatron.data.index_format import HEADER_BYTES, Header, bin_path, idx_path
from trimegatron.errors import DataError

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
