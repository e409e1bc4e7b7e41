"""The GPT dataset: samples of L + 1 tokens in a shuffled order that is fixed by the seed.

Each *sequence* of the index file counts as a document, as in Megatron. ``indices.py`` has the rules of the order.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.data.index_cache import IndexCache, Log
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indices import Epochs, GPTIndices, build_indices
from trimegatron.data.splits import SPLITS, Range, split_ranges
from trimegatron.errors import DataError

_FEW = 4  # samples: fewer are read one by one, which is then faster


class GPTDataset:
    """Samples of one split; ``dataset[i]`` is int64 [L + 1]: inputs are all but the last token, labels all but the
    first.

    Args:
        data: the tokens.
        indices: the maps, from ``build_indices``.
        seq_length: L.
        name: ``train``, ``valid`` or ``test``.
        index_files: where ``indices`` are mapped from; with them a worker process maps the files instead of receiving
            copies.
    """

    def __init__(
        self,
        data: IndexedDataset,
        indices: GPTIndices,
        seq_length: int,
        name: str,
        index_files: Sequence[Path] = (),
    ) -> None:
        self.data, self.indices, self.seq_length, self.name = data, indices, seq_length, name
        self.index_files = tuple(index_files)

    def __len__(self) -> int:
        """Samples that were built, n: at least as many as were asked for."""
        return len(self.indices.shuffle_index)

    def __getitem__(self, index: int) -> np.ndarray:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} ({self.name})")
        row = int(self.indices.shuffle_index[index])
        (first, begin), (last, end) = self.indices.sample_index[row : row + 2].tolist()
        sequences = self.indices.document_index[first : last + 1].tolist()
        sample = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        for k, sequence in enumerate(sequences):
            start = begin if k == 0 else 0
            length = end + 1 - start if k == len(sequences) - 1 else None
            piece = self.data.get(sequence, start, length)
            sample[filled : filled + len(piece)] = piece
            filled += len(piece)
        assert filled == len(sample)
        return sample

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        """The samples of ``indices``, at least one, in one array int64 [b, L + 1]: a loader's micro-batch.

        The places of all pieces are computed together. That takes some twenty calls however many samples there are, so
        it pays from a few on, and the more so the shorter the documents.
        """
        if len(indices) < _FEW:
            return np.stack([self[index] for index in indices])
        chosen = np.asarray(indices, np.int64)
        if not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"samples {chosen.min()} to {chosen.max()} of {len(self)} ({self.name})")
        rows = self.indices.shuffle_index[chosen].astype(np.int64)
        first, begin = self.indices.sample_index[rows].T.astype(np.int64)
        last, end = self.indices.sample_index[rows + 1].T.astype(np.int64)
        # A piece is what a sample takes of one sequence: counts[k] of them make sample k, in a row.
        counts = last - first + 1
        stops = counts.cumsum()
        position = np.arange(stops[-1]) + np.repeat(first - (stops - counts), counts)
        sequences = self.indices.document_index[position]
        piece_begin = self.data.starts_of(sequences)
        piece_end = piece_begin + self.data.sizes[sequences]
        piece_end[stops - 1] = piece_begin[stops - 1] + end + 1  # before the next line: both may be the same piece
        piece_begin[stops - counts] += begin
        pieces = [self.data.tokens[i:j] for i, j in zip(piece_begin.tolist(), piece_end.tolist(), strict=True)]
        samples = np.empty((len(chosen), self.seq_length + 1), np.int64)
        np.concatenate(pieces, out=samples.reshape(-1))
        return samples

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.index_files:
            return GPTDataset, (self.data, self.indices, self.seq_length, self.name)
        return _reopen, (self.data, self.index_files, self.seq_length, self.name)


def _reopen(data: IndexedDataset, index_files: tuple[Path, ...], seq_length: int, name: str) -> GPTDataset:
    indices = GPTIndices(*(np.load(path, mmap_mode="r").view(np.ndarray) for path in index_files))
    return GPTDataset(data, indices, seq_length, name, index_files)


Datasets = tuple[GPTDataset | None, GPTDataset | None, GPTDataset | None]


def build_gpt_datasets(
    prefix: str | Path,
    *,
    split: str,
    seq_length: int,
    seed: int,
    num_samples: Mapping[str, int] | Sequence[int],
    cache_dir: str | Path | None = None,
    log: Log = print,
) -> Datasets:
    """The training, validation and test dataset of one ``.bin``/``.idx`` pair.

    Any number of processes may call this at once, without any communication: one builds what is missing from the
    cache and the others wait for it (see ``index_cache.py``).

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``.
        split: weights of train, valid, test (``--split``).
        seq_length: L.
        seed: the run's seed.
        num_samples: samples needed, as {"train": …, "valid": …, "test": …} or in that order. Megatron's numbers are
            train_iters·B, (train_iters div eval_interval + 1)·eval_iters·B and eval_iters·B for a global batch of B.
        cache_dir: where the index maps are kept; ``PREFIX/cache/GPTDataset_indices`` without it, as Megatron.
        log: takes one line per dataset, and one whenever another process is waited for.

    Returns:
        Three datasets. None where the weight is 0 or no samples are needed; the test set is also None (with a line
        that says so) where its share of the sequences rounds to nothing.

    Raises:
        DataError: the pair cannot be read, a training or validation split holds no tokens, the cache cannot be
            written.
    """
    if seq_length < 1:
        raise DataError(f"--seq-length ({seq_length}) must be at least 1")
    needed = num_samples if isinstance(num_samples, Mapping) else dict(zip(SPLITS, num_samples, strict=True))
    data = IndexedDataset(prefix)
    folder = Path(cache_dir) if cache_dir is not None else Path(prefix) / "cache" / "GPTDataset_indices"
    content = data.fingerprint()
    datasets: list[GPTDataset | None] = []
    for name, documents in zip(SPLITS, split_ranges(split, len(data)), strict=True):
        samples = needed.get(name, 0)
        if documents is None or samples == 0 or not _has_tokens(data, name, documents, split, samples, log):
            datasets.append(None)
            continue
        epochs = Epochs.plan(_count_tokens(data, documents), seq_length, samples)
        description = {
            "random": "numpy.random.RandomState (MT19937).shuffle",
            "data": content,
            "split": split,
            "documents": documents,
            "seq_length": seq_length,
            "num_samples": samples,
            "seed": seed,
        }
        cache = IndexCache(folder, f"GPTDataset-{name}", description, log)
        indices = cache.load_or_build(lambda d=documents, e=epochs: build_indices(data.sizes, d, seq_length, e, seed))  # type: ignore[misc]
        log(
            f"{name}: {documents[1] - documents[0]:,} documents [{documents[0]}, {documents[1]}) of {len(data):,}, "
            f"{epochs.tokens:,} tokens, {epochs.num_epochs:,} epochs for {samples:,} samples; "
            f"{epochs.num_samples:,} of {seq_length} tokens built"
        )
        datasets.append(GPTDataset(data, indices, seq_length, name, cache.files))
    train, valid, test = datasets
    return train, valid, test


def _count_tokens(data: IndexedDataset, documents: Range) -> int:
    return int(data.sizes[slice(*documents)].sum(dtype=np.int64))


def _has_tokens(data: IndexedDataset, name: str, documents: Range, split: str, samples: int, log: Log) -> bool:
    """False for an empty test split, with a line; DataError for the other two. (Megatron waits for ever here.)"""
    if _count_tokens(data, documents) > 0:
        return True
    holds = (
        "no documents" if documents[0] == documents[1] else f"{documents[1] - documents[0]} documents without any token"
    )
    message = f"{data.prefix}: --split {split} over {len(data)} documents leaves the {name} split {holds}"
    if name == "test":
        log(f"{message}; going on without a test set")
        return False
    raise DataError(
        f"{message}, but {samples} samples are needed; give it a larger weight in --split, or 0 to go without it, "
        "or preprocess more documents"
    )
