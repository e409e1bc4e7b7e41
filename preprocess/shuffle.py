"""``--shuffle-seed``: documents in a random order, in bounded memory.

The order is a function of the seed and of the documents' numbers in the input alone: each document has a 64-bit key,
the hash of (seed, number), and documents are written by ascending key. Keys are spread evenly, so documents first go to
files by the leading part of their key, each small enough to be sorted in memory, and then from file to file to the end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trimegatron.data.indexed_writer import IndexedDatasetWriter

_BUCKET_BYTES = 64 << 20  # of JSON behind a bucket, about: its tokens take less
_BUFFER_BYTES = 64 << 20  # held in memory before it goes to the buckets
_MAX_BUCKETS = 1 << 12


def document_keys(seed: int, first: int, count: int) -> np.ndarray:
    """uint64 [count]: the keys of documents ``first``, ``first`` + 1, … (two rounds of the SplitMix64 finalizer).

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return _mix(numbers + _mix(np.array([seed], np.uint64)))


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Documents(NamedTuple):
    """Some documents: their keys, tokens, lengths of sequences, sequences of each."""

    keys: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    sequences: np.ndarray

    def pack(self) -> bytes:
        """As bytes, which ``unpack`` reads back."""
        sizes = np.array([len(part) for part in self], "<i8")
        return b"".join(part.tobytes() for part in (sizes, *self))

    @classmethod
    def unpack(cls, data: bytes, dtype: np.dtype) -> Iterator[Documents]:
        kinds: list[Any] = ["<u8", dtype, "<i4", "<i4"]
        at = 0
        while at < len(data):
            sizes = np.frombuffer(data, "<i8", 4, at)
            at += 32
            parts = []
            for size, kind in zip(sizes.tolist(), kinds, strict=True):
                parts.append(np.frombuffer(data, kind, size, at))
                at += parts[-1].nbytes
            yield cls(*parts)

    def take(self, order: np.ndarray) -> Documents:
        """The documents whose places are in ``order``, in that order."""
        firsts = np.concatenate(([0], self.sequences.cumsum(dtype=np.int64)))
        ends = np.concatenate(([0], self.lengths.cumsum(dtype=np.int64)))
        tokens = _pick(self.tokens, ends[firsts], order)
        return Documents(self.keys[order], tokens, _pick(self.lengths, firsts, order), self.sequences[order])


def _pick(values: np.ndarray, bounds: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Pieces [bounds[k], bounds[k + 1]) of ``values`` for k in ``order``, as one array. Slices need less memory than
    an index for every value.
    """
    pairs = zip(bounds[:-1][order].tolist(), bounds[1:][order].tolist(), strict=True)
    return np.concatenate([values[:0], *(values[start:stop] for start, stop in pairs)])


class Shuffler:
    """Takes documents and gives them to a writer in the order of their keys.

    Args:
        writer: gets them when all are there.
        folder: for the files in between.
        text_bytes: about how much JSON there will be.
        sizes: go on from ``sync``: what lies in the files beyond these sizes is cut off.
    """

    def __init__(
        self, writer: IndexedDatasetWriter, folder: Path, text_bytes: int, sizes: list[int] | None = None
    ) -> None:
        wanted = len(sizes) if sizes is not None else min(_MAX_BUCKETS, text_bytes // _BUCKET_BYTES + 1)
        self._bits = (wanted - 1).bit_length()
        self.writer = writer
        self._paths = [folder / f"{writer.prefix.name}.shuffle{k:04}" for k in range(1 << self._bits)]
        self._buffers: list[list[bytes]] = [[] for _ in self._paths]
        self._buffered = 0
        self._sizes = sizes or [0] * len(self._paths)
        for path, size in zip(self._paths, self._sizes, strict=True):
            with path.open("r+b" if sizes is not None else "wb") as file:
                file.truncate(size)

    def add(self, documents: Documents) -> None:
        """Take some documents, in the order of the input."""
        buckets = np.zeros(len(documents.keys), np.int64)
        if self._bits:
            buckets = (documents.keys >> np.uint64(64 - self._bits)).astype(np.int64)
        order = buckets.argsort(kind="stable")
        found, starts = np.unique(buckets[order], return_index=True)
        for bucket, places in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            self._buffers[bucket].append(documents.take(places).pack())
            self._buffered += len(self._buffers[bucket][-1])
        if self._buffered > _BUFFER_BYTES:
            self.sync()

    def sync(self) -> list[int]:
        """Write what is buffered. Returns the sizes of the files."""
        for k, (path, buffer) in enumerate(zip(self._paths, self._buffers, strict=True)):
            if buffer:
                with path.open("ab") as file:
                    file.writelines(buffer)
                    file.flush()
                    os.fsync(file.fileno())
                self._sizes[k] += sum(map(len, buffer))
                buffer.clear()
        self._buffered = 0
        return list(self._sizes)

    def drain(self) -> None:
        """Give all documents to the writer. The files stay, so that this can be done again."""
        self.sync()
        for path in self._paths:
            parts = list(Documents.unpack(path.read_bytes(), self.writer.dtype))
            if parts:
                whole = Documents(*(np.concatenate(column) for column in zip(*parts, strict=True)))
                del parts
                ready = whole.take(whole.keys.argsort(kind="stable"))
                self.writer.add_documents(ready.tokens, ready.lengths, ready.sequences)
