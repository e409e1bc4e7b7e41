"""The layout of Megatron's memory-mapped token files, ``PREFIX.bin`` and ``PREFIX.idx``, all little-endian.

``.bin``: the tokens of all sequences one after another, nothing else. ``.idx``:

    offset  type      meaning
    0       9 bytes   b"MMIDIDX\\0\\0"
    9       u64       version, 1
    17      u8        token type code
    18      u64       S, number of sequences
    26      u64       D, entries of the document array (documents + 1)
    34      int32[S]  tokens in each sequence
    then    int64[S]  byte offset of each sequence in .bin
    then    int64[D]  document array: entry k + 1 is the number of sequences after document k; the first is 0, the
        last S

A document may hold no sequence at all (its entry repeats the one before). Nothing is aligned.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimegatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
MAGIC_LAZY = b"TNTIDX\x00\x00"
VERSION = 1
FIELDS = struct.Struct("<QBQQ")  # version, type code, S, D
HEADER_BYTES = len(MAGIC) + FIELDS.size

# Code 7 means float64 in Megatron of 2022 and float32 today; floating-point tokens are refused.
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


def best_dtype(vocab_size: int) -> np.dtype:
    """The token type Megatron writes: uint16 for a vocabulary strictly below 65500, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """``PREFIX.bin``: the tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """``PREFIX.idx``: where each sequence and document lies."""
    return Path(f"{prefix}.idx")


class Header(NamedTuple):
    """What the first 34 bytes of an ``.idx`` say."""

    dtype: np.dtype
    num_sequences: int  # S
    num_document_entries: int  # D

    @property
    def file_bytes(self) -> int:
        """The size the whole ``.idx`` must have."""
        return HEADER_BYTES + 12 * self.num_sequences + 8 * self.num_document_entries

    def pack(self) -> bytes:
        """The 34 bytes."""
        return MAGIC + FIELDS.pack(VERSION, CODES[self.dtype], self.num_sequences, self.num_document_entries)

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read and check the header of ``path``. Raises DataError, with the rule and the way out."""
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
        if raw.startswith(MAGIC_LAZY):
            raise DataError(
                f"{path}: written with --dataset-impl lazy or cached, which is not supported yet; "
                "preprocess again with --dataset-impl mmap"
            )
        if not raw.startswith(MAGIC):
            raise DataError(
                f"{path}: begins with {raw[: len(MAGIC)]!r}, an index begins with {MAGIC!r}; "
                "give --data-path the prefix of a pair that preprocess wrote"
            )
        if len(raw) < HEADER_BYTES:
            raise DataError(f"{path}: cut short at {len(raw)} bytes; preprocess again")
        version, code, sequences, entries = FIELDS.unpack(raw[len(MAGIC) :])
        if version != VERSION:
            raise DataError(f"{path}: index version {version}, only {VERSION} is known")
        if code not in DTYPES:
            raise DataError(f"{path}: token type code {code}; integers are expected, codes {sorted(DTYPES)}")
        return cls(DTYPES[code], sequences, entries)
