"""The GPT dataset: samples of L + 1 tokens in a shuffled order that is fixed by the seed.

Each *sequence* of the index file counts as a document, as in Megatron. ``indices.py`` has the rules of the order,
``blended_dataset.py`` mixes several of these.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.data.index_cache import IndexCache, Log
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indices import Epochs, GPTIndices, stream_indices
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
        description: all that ``indices`` depend on, JSON-ready.
    """

    def __init__(
        self,
        data: IndexedDataset,
        indices: GPTIndices,
        seq_length: int,
        name: str,
        index_files: Sequence[Path] = (),
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.data, self.indices, self.seq_length, self.name = data, indices, seq_length, name
        self.index_files = tuple(index_files)
        self.description = dict(description or {})

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
        starts = [begin] + [0] * (last - first)
        lengths = [None] * (last - first) + [end + 1 - starts[-1]]
        sample = np.concatenate(list(map(self.data.get, sequences, starts, lengths)), dtype=np.int64)
        assert len(sample) == self.seq_length + 1
        return sample

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        """The samples of ``indices``, at least one, in one array int64 [b, L + 1]: a loader's micro-batch.

        The places of all pieces are computed together. That takes some twenty calls however many samples there are, so
        it pays from a few on, and the more so the shorter the documents.
        """
        tokens = self.data.tokens
        if len(indices) < _FEW or tokens is None:
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
        pieces = [tokens[i:j] for i, j in zip(piece_begin.tolist(), piece_end.tolist(), strict=True)]
        samples = np.empty((len(chosen), self.seq_length + 1), np.int64)
        np.concatenate(pieces, out=samples.reshape(-1))
        return samples

    def sources(self, samples: np.ndarray) -> dict[str, int]:
        """How many of ``samples``, dataset indices, come from which prefix: all from this one."""
        return {str(self.data.prefix): len(samples)}

    def documents(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Which documents of the prefix the ``samples``, dataset indices, hold tokens of, in ascending order."""
        rows = self.indices.shuffle_index[samples].astype(np.int64)
        first, last = self.indices.sample_index[rows, 0], self.indices.sample_index[rows + 1, 0]
        pieces = [self.indices.document_index[i : j + 1] for i, j in zip(first.tolist(), last.tolist(), strict=True)]
        return {str(self.data.prefix): np.unique(np.concatenate(pieces))}

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.index_files:
            return GPTDataset, (self.data, self.indices, self.seq_length, self.name)
        return _reopen, (self.data, self.index_files, self.seq_length, self.name)


def _reopen(data: IndexedDataset, index_files: tuple[Path, ...], seq_length: int, name: str) -> GPTDataset:
    indices = GPTIndices(*(np.load(path, mmap_mode="r").view(np.ndarray) for path in index_files))
    return GPTDataset(data, indices, seq_length, name, index_files)


@dataclass(frozen=True)
class Part:
    """The sequences of one pair that serve one split."""

    data: IndexedDataset
    documents: Range

    @property
    def num_tokens(self) -> int:
        """T, of one epoch."""
        return int(self.data.sizes[slice(*self.documents)].sum(dtype=np.int64))

    def problem(self) -> str | None:
        """Why no sample can come from here. (Megatron waits for ever where there is no token.)"""
        first, last = self.documents
        if first == last:
            return "no documents"
        return f"{last - first} documents without any token" if self.num_tokens == 0 else None

    def __str__(self) -> str:
        first, last = self.documents
        return f"{last - first:,} documents [{first}, {last}) of {len(self.data):,}, {self.num_tokens:,} tokens"


@dataclass(frozen=True)
class GPTDatasetBuilder:
    """What the datasets of a run share.

    Args:
        seq_length: L.
        seed: the run's seed.
        compat: whose rules, Megatron's of 2022 or of 2026.
        impl: how tokens are read, see ``IndexedDataset``.
        cache_dir: where the index maps are kept; ``PREFIX/cache/GPTDataset_indices`` without it, as Megatron.
        log: takes one line per dataset, and one whenever another process is waited for.
    """

    seq_length: int
    seed: int
    compat: int = 2026
    impl: str = "infer"
    cache_dir: str | Path | None = None
    log: Log = print

    def cache_folder(self, prefix: str | Path) -> Path:
        """Where the maps of a pair go."""
        return Path(self.cache_dir) if self.cache_dir is not None else Path(prefix) / "cache" / "GPTDataset_indices"

    def epochs(self, part: Part, num_samples: int | None) -> Epochs:
        """How often ``part`` is repeated for so many samples; None: once."""
        return Epochs.plan(part.num_tokens, self.seq_length, num_samples or 0)

    def build(self, part: Part, name: str, num_samples: int | None) -> GPTDataset:
        """The dataset of split ``name``, with at least ``num_samples`` samples (None: those of one epoch).

        Any number of processes may call this at once, without any communication: one builds what is missing from the
        cache and the others wait for it (see ``index_cache.py``).
        """
        epochs = self.epochs(part, num_samples)
        description = {
            "random": "numpy.random.RandomState (MT19937).shuffle",
            "data": part.data.fingerprint(),
            "documents": list(part.documents),
            "seq_length": self.seq_length,
            "num_epochs": epochs.num_epochs,
            "separate_last": epochs.separate_last,
            "seed": self.seed,
        }
        folder = self.cache_folder(part.data.prefix)
        cache = IndexCache(folder, f"GPTDataset-{name}", GPTIndices, description, self.log)
        indices = cache.load_or_build(
            lambda: stream_indices(part.data.sizes, part.documents, self.seq_length, epochs, self.seed)
        )
        return GPTDataset(part.data, indices, self.seq_length, name, cache.files, description)

    def build_alone(self, part: Part, name: str, num_samples: int, split: str) -> GPTDataset | None:
        """A split that a single pair serves. None, with a line, where it is empty and the run can go without.

        Raises:
            DataError: it holds no tokens and is needed. By the rules of 2022 an empty validation set is not needed.
        """
        problem = part.problem()
        if problem is None:
            dataset = self.build(part, name, num_samples)
            epochs = self.epochs(part, num_samples)
            self.log(
                f"{name}: {part}, {epochs.num_epochs:,} epochs for {num_samples:,} samples; "
                f"{len(dataset):,} of {self.seq_length} tokens built"
            )
            return dataset
        message = f"{part.data.prefix}: {split} over {len(part.data)} documents leaves the {name} split {problem}"
        if not is_needed(name, self.compat):
            self.log(f"{message}; going on without a {name} set")
            return None
        raise DataError(
            f"{message}, but {num_samples} samples are needed; give it a larger weight in --split, or 0 to go without "
            "it, or preprocess more documents"
        )


def is_needed(name: str, compat: int) -> bool:
    """Whether a run stops where split ``name`` has a weight but rounds to nothing."""
    return name == "train" or (name == "valid" and compat == 2026)


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
    compat: int = 2026,
    impl: str = "infer",
) -> Datasets:
    """The training, validation and test dataset of one ``.bin``/``.idx`` pair.

    Args:
        prefix: path of the pair without ``.bin`` and ``.idx``.
        split: weights of train, valid, test (``--split``).
        seq_length, seed, cache_dir, log, compat, impl: see ``GPTDatasetBuilder``.
        num_samples: samples needed, as {"train": …, "valid": …, "test": …} or in that order. Megatron's numbers are
            train_iters·B, (train_iters div eval_interval + 1)·eval_iters·B and eval_iters·B for a global batch of B.

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
    builder = GPTDatasetBuilder(seq_length, seed, compat, impl, cache_dir, log)
    data = IndexedDataset(prefix, impl)
    train, valid, test = (
        None
        if documents is None or not needed.get(name)
        else builder.build_alone(Part(data, documents), name, needed[name], f"--split {split}")
        for name, documents in zip(SPLITS, split_ranges(split, len(data), compat), strict=True)
    )
    return train, valid, test
