"""The layout of Megatron-LM's older index, ``--dataset-impl lazy`` and ``cached`` (2022 only), all little-endian.

``.bin`` is the same as everywhere: the tokens one after another. ``.idx``:

    offset  type        meaning
    0       8 bytes     b"TNTIDX\\0\\0"
    8       u64         version, 1
    16      u64         token type code, that of ``index_format.py``
    24      u64         bytes of one token
    32      u64         n, number of sequences
    40      u64         s, number of sizes; tokens have one dimension, so s = n
    48      u64         d, entries of the document array (documents + 1)
    56      int64[n+1]  dimension offsets: 0 … n
    then    int64[n+1]  offset of each sequence in .bin, and the end, in *tokens*
    then    int64[s]    tokens in each sequence
    then    int64[d]    document array, as in ``index_format.py``

The two kinds do not differ on disk: in Megatron-LM they name two ways of reading.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimegatron.data.index_format import CODES, DTYPES, MAGIC_LAZY, VERSION
from trimegatron.errors import DataError

FIELDS = struct.Struct("<6Q")  # version, type code, token bytes, n, s, d
HEADER_BYTES = len(MAGIC_LAZY) + FIELDS.size


class LegacyHeader(NamedTuple):
    """What the first 56 bytes of such an ``.idx`` say."""

    dtype: np.dtype
    num_sequences: int  # n = s
    num_document_entries: int  # d

    @property
    def offsets_at(self) -> int:
        """Byte where the offsets of the sequences, int64 [n + 1], begin."""
        return HEADER_BYTES + 8 * (self.num_sequences + 1)

    @property
    def sizes_at(self) -> int:
        """Byte where the lengths of the sequences, int64 [n], begin."""
        return self.offsets_at + 8 * (self.num_sequences + 1)

    @property
    def documents_at(self) -> int:
        """Byte where the document array, int64 [d], begins."""
        return self.sizes_at + 8 * self.num_sequences

    @property
    def file_bytes(self) -> int:
        """The size the whole ``.idx`` must have."""
        return self.documents_at + 8 * self.num_document_entries

    def pack(self) -> bytes:
        """The 56 bytes."""
        n, d = self.num_sequences, self.num_document_entries
        return MAGIC_LAZY + FIELDS.pack(VERSION, CODES[self.dtype], self.dtype.itemsize, n, n, d)

    @classmethod
    def read(cls, path: Path) -> LegacyHeader:
        """Read and check the header of ``path``. Raises DataError, with the rule and the way out."""
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
        if not raw.startswith(MAGIC_LAZY):
            raise DataError(
                f"{path}: begins with {raw[: len(MAGIC_LAZY)]!r}, a lazy or cached index with {MAGIC_LAZY!r}"
            )
        if len(raw) < HEADER_BYTES:
            raise DataError(f"{path}: cut short at {len(raw)} bytes; preprocess again")
        version, code, itemsize, n, s, d = FIELDS.unpack(raw[len(MAGIC_LAZY) :])
        if version != VERSION:
            raise DataError(f"{path}: index version {version}, only {VERSION} is known")
        if code not in DTYPES:
            raise DataError(f"{path}: token type code {code}; integers are expected, codes {sorted(DTYPES)}")
        if itemsize != DTYPES[code].itemsize:
            raise DataError(f"{path}: {itemsize} bytes a token, but type code {code} has {DTYPES[code].itemsize}")
        if s != n:
            raise DataError(f"{path}: {s} sizes for {n} sequences; tokens of more than one dimension are not text")
        return cls(DTYPES[code], n, d)
