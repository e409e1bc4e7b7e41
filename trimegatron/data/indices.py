"""The three maps from sample numbers to tokens, equal to Megatron's (today's) element for element.

T: tokens of one epoch; L: sequence length; N: samples asked for; E: epochs; n: samples built, (E·T − 1) div L.

The sequences in the order of ``document_index`` make one long stream of E·T tokens. Sample j of the stream is the L +
1 tokens from number j·L on: its last is the next sample's first. Sample i of the dataset is sample
``shuffle_index[i]`` of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 16  # sequences walked at a time, and rows: the int64 temporaries stay in the processor's cache


class Chunks(NamedTuple):
    """An array that is made piece by piece along its first axis, so that it can be written without being held."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[np.ndarray | None], Iterator[np.ndarray]]
    """The pieces in order: those of an array of that shape, or new ones."""

    def parts(self) -> Iterator[np.ndarray]:
        """The pieces, none of which is kept."""
        return self.make(None)

    def whole(self) -> np.ndarray:
        """The array in memory."""
        array = np.empty(self.shape, self.dtype)
        filled = sum(len(part) for part in self.make(array))
        assert filled == len(array)
        return array


class Epochs(NamedTuple):
    """How often the sequences are repeated to serve N samples."""

    tokens: int  # T
    num_epochs: int  # E, the smallest E >= 1 with (E·T − 1) div L >= N
    num_samples: int  # n
    samples_before_last: int  # samples of the first E − 1 epochs
    separate_last: bool  # the last epoch is shuffled by itself, so that a part of it never mixes into the whole ones

    @classmethod
    def plan(cls, tokens: int, seq_length: int, num_samples: int) -> Epochs:
        """The rule: the last epoch stands apart when fewer than 80 % of its samples are needed.

        Args:
            tokens: T, at least 1.
            seq_length: L.
            num_samples: N.
        """
        assert tokens > 0
        epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
        before_last = max(0, ((epochs - 1) * tokens - 1) // seq_length)
        per_epoch = (tokens - 1) // seq_length
        separate = epochs > 1 and num_samples - before_last < int(0.80 * per_epoch)
        return cls(tokens, epochs, (epochs * tokens - 1) // seq_length, before_last, separate)


class GPTIndices(NamedTuple):
    """The maps of one split."""

    document_index: np.ndarray  # int32 [E · sequences]: which sequence stands where in the stream
    sample_index: np.ndarray  # int32 or int64 [n + 1, 2]: where token j·L lies: position in document_index, offset
    shuffle_index: np.ndarray  # uint32 or int64 [n]


def build_indices(
    sizes: np.ndarray, documents: tuple[int, int], seq_length: int, epochs: Epochs, seed: int
) -> GPTIndices:
    """All three maps in memory; ``stream_indices`` has the arguments."""
    parts = stream_indices(sizes, documents, seq_length, epochs, seed)
    return GPTIndices(*(part.whole() if isinstance(part, Chunks) else part for part in parts))


def stream_indices(
    sizes: np.ndarray, documents: tuple[int, int], seq_length: int, epochs: Epochs, seed: int
) -> Iterator[np.ndarray | Chunks]:
    """The maps one after another, in the order of ``GPTIndices``: a caller that writes each away and drops it needs
    the memory of one permutation at a time.

    One legacy MT19937 generator, whose ``shuffle`` fixes the order for good, makes both permutations.

    Args:
        sizes: int32 [S], tokens in each sequence of the whole file.
        documents: [lo, hi), the sequences of this split.
        seq_length: L.
        epochs: from ``Epochs.plan``.
        seed: the run's seed, the same for every split.
    """
    random = np.random.RandomState(seed)
    document_index = _document_index(random, documents, epochs)
    yield document_index
    yield _sample_index(sizes, document_index, seq_length, epochs.num_samples)
    del document_index
    yield _shuffle_index(random, epochs)


def _document_index(random: np.random.RandomState, documents: tuple[int, int], epochs: Epochs) -> np.ndarray:
    # Tiled in int32: Megatron's int64 grid takes four times the memory for the same permutation.
    index = np.tile(np.arange(*documents, dtype=np.int32), epochs.num_epochs)
    return _shuffle_parts(random, index, len(index) - (documents[1] - documents[0]) if epochs.separate_last else None)


def _shuffle_index(random: np.random.RandomState, epochs: Epochs) -> np.ndarray:
    dtype = np.uint32 if epochs.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    index = np.arange(epochs.num_samples, dtype=dtype)
    return _shuffle_parts(random, index, epochs.samples_before_last if epochs.separate_last else None)


def _shuffle_parts(random: np.random.RandomState, index: np.ndarray, cut: int | None) -> np.ndarray:
    """Shuffle ``index`` in place, as a whole or on each side of ``cut``."""
    for part in (index,) if cut is None else (index[:cut], index[cut:]):
        random.shuffle(part)
    return index


def _sample_index(sizes: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int) -> Chunks:
    """Where each sample begins, int [n + 1, 2]; int64 where a position or an offset needs it."""
    largest = max(len(document_index), int(sizes.max(initial=0)))
    dtype = np.dtype(np.int64 if largest > np.iinfo(np.int32).max else np.int32)
    return Chunks((num_samples + 1, 2), dtype, lambda out: _sample_rows(sizes, document_index, seq_length, dtype, out))


def _sample_rows(
    sizes: np.ndarray, document_index: np.ndarray, seq_length: int, dtype: np.dtype, out: np.ndarray | None
) -> Iterator[np.ndarray]:
    """The rows of the sample index, chunk by chunk of sequences.

    The multiples of L before a sequence's end number ceil(end / L), so the rows follow from a running sum and one
    repeat, without a search. An empty sequence holds none; only row 0 may point at one, as (0, 0).
    """
    start, row = 0, 0  # tokens and rows of the chunks before
    mean = int(sizes[document_index[:_CHUNK]].mean(dtype=np.float64)) + 1  # long sequences hold many rows each
    step = max(1, min(_CHUNK, _CHUNK * seq_length // mean))
    for first in range(0, len(document_index), step):
        lengths = sizes[document_index[first : first + step]]  # not ``take``: of an unaligned map it copies all
        total = int(lengths.sum(dtype=np.int64))
        # Inside a chunk int32 nearly always holds, and takes half the time.
        kind = np.int32 if total + 2 * seq_length <= np.iinfo(np.int32).max else np.int64
        ends = lengths.cumsum(dtype=kind)
        offset = row * seq_length - start  # of the next row's token in this chunk
        counts = np.diff((ends + kind(seq_length - 1 - offset)) // kind(seq_length), prepend=kind(0))
        position = np.repeat(np.arange(len(ends), dtype=np.int32), counts)
        rows = np.empty((len(position), 2), dtype) if out is None else out[row : row + len(position)]
        np.add(position, dtype.type(first), out=rows[:, 0])
        ends -= lengths
        tokens = np.arange(offset, offset + len(rows) * seq_length, seq_length, dtype=kind)
        # No place is out of bounds, and mode="clip" takes half the time of finding that out.
        np.subtract(tokens, ends.take(position, mode="clip"), out=rows[:, 1], casting="unsafe")
        if row == 0 and len(rows):
            rows[0] = 0
        start += total
        row += len(rows)
        yield rows
