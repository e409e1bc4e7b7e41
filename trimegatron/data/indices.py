"""The three maps from sample numbers to tokens, equal to Megatron's (today's) element for element.

T: tokens of one epoch; L: sequence length; N: samples asked for; E: epochs; n: samples built, (E·T − 1) div L.

The sequences in the order of ``document_index`` make one long stream of E·T tokens. Sample j of the stream is the L +
1 tokens from number j·L on: its last is the next sample's first. Sample i of the dataset is sample
``shuffle_index[i]`` of the stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_CHUNK = 1 << 20  # sequences walked at a time: bounds the int64 temporaries


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
    """All three maps, from one legacy MT19937 generator whose ``shuffle`` fixes the order for good.

    Args:
        sizes: int32 [S], tokens in each sequence of the whole file.
        documents: [lo, hi), the sequences of this split.
        seq_length: L.
        epochs: from ``Epochs.plan``.
        seed: the run's seed, the same for every split.
    """
    random = np.random.RandomState(seed)
    document_index = _document_index(random, documents, epochs)
    sample_index = _sample_index(sizes, document_index, seq_length, epochs.num_samples)
    return GPTIndices(document_index, sample_index, _shuffle_index(random, epochs))


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


def _sample_index(sizes: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int) -> np.ndarray:
    """Where each sample begins, int [n + 1, 2].

    The multiples of L inside [start, end) of a sequence number ceil(end/L) − ceil(start/L), so the rows follow from a
    running sum and one repeat per chunk, without a search. An empty sequence holds none; only row 0 may point at one,
    as (0, 0).
    """
    largest = max(len(document_index), int(sizes.max(initial=0)))
    rows = np.empty((num_samples + 1, 2), np.int64 if largest > np.iinfo(np.int32).max else np.int32)
    start, row = 0, 0
    for first in range(0, len(document_index), _CHUNK):
        ends = sizes[document_index[first : first + _CHUNK]].cumsum(dtype=np.int64) + start
        starts = np.concatenate(([start], ends[:-1]))
        counts = -(-ends // seq_length) + (-starts // seq_length)
        position = np.repeat(np.arange(len(ends)), counts)
        stop = row + len(position)
        rows[row:stop, 0] = position + first
        rows[row:stop, 1] = np.arange(row, stop) * seq_length - starts[position]
        start, row = int(ends[-1]), stop
    assert row == num_samples + 1
    rows[0] = 0
    return rows
