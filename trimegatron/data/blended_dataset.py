"""Several datasets mixed by weight, and the building of a run's three splits from ``--data-path``.

``blend_indices.py`` has the rule that says which set sample i comes from.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimegatron.config.blend import Blend
from trimegatron.data.blend_indices import BlendIndices, blend_by_weights, normalise
from trimegatron.data.gpt_dataset import GPTDataset, GPTDatasetBuilder, Part, is_needed
from trimegatron.data.index_cache import IndexCache
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.splits import SPLITS, split_ranges
from trimegatron.errors import DataError

MAX_SETS = np.iinfo(np.int16).max - 1
SURPLUS = 1.005  # each set is built for half a percent more than its share, as in Megatron


class BlendedDataset:
    """A mixture; ``dataset[i]`` is a sample of one of its sets.

    Args:
        datasets: the sets, None for those that no sample comes from.
        indices: which sample of which set.
        name: ``train``, ``valid`` or ``test``.
        index_files, description: as ``GPTDataset``'s.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset | None],
        indices: BlendIndices,
        name: str,
        index_files: Sequence[Path] = (),
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.datasets, self.indices, self.name = tuple(datasets), indices, name
        self.index_files = tuple(index_files)
        self.description = dict(description or {})

    def __len__(self) -> int:
        return len(self.indices.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} ({self.name})")
        dataset = self.datasets[self.indices.dataset_index[index]]
        assert dataset is not None
        return dataset[self.indices.dataset_sample_index[index]]

    def __getitems__(self, indices: Sequence[int]) -> np.ndarray:
        """The samples of ``indices``, int64 [b, L + 1]; those of one set are read together."""
        chosen = np.asarray(indices, np.int64)
        if not (chosen.min() >= 0 and chosen.max() < len(self)):
            raise IndexError(f"samples {chosen.min()} to {chosen.max()} of {len(self)} ({self.name})")
        sets, numbers = self.indices.dataset_index[chosen], self.indices.dataset_sample_index[chosen]
        samples: np.ndarray | None = None
        for k in np.unique(sets).tolist():
            dataset = self.datasets[k]
            assert dataset is not None
            (here,) = np.nonzero(sets == k)
            found = dataset.__getitems__(numbers[here].tolist())
            samples = np.empty((len(chosen), found.shape[1]), np.int64) if samples is None else samples
            samples[here] = found
        assert samples is not None
        return samples

    def sources(self, samples: np.ndarray) -> dict[str, int]:
        """How many of ``samples``, dataset indices, come from which prefix."""
        counts = np.bincount(self.indices.dataset_index[samples], minlength=len(self.datasets))
        found: dict[str, int] = {}
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            if dataset is not None:
                prefix = str(dataset.data.prefix)
                found[prefix] = found.get(prefix, 0) + count
        return found

    def documents(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Which documents of which prefix the ``samples``, dataset indices, hold tokens of, in ascending order."""
        sets, numbers = self.indices.dataset_index[samples], self.indices.dataset_sample_index[samples]
        found: dict[str, np.ndarray] = {}
        for k in np.unique(sets).tolist():
            dataset = self.datasets[k]
            assert dataset is not None
            for prefix, documents in dataset.documents(numbers[sets == k]).items():
                found[prefix] = np.union1d(found.get(prefix, documents), documents)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.index_files:
            return BlendedDataset, (self.datasets, self.indices, self.name)
        return _reopen, (self.datasets, self.index_files, self.name)


def _reopen(datasets: tuple[GPTDataset | None, ...], index_files: tuple[Path, ...], name: str) -> BlendedDataset:
    indices = BlendIndices(*(np.load(path, mmap_mode="r").view(np.ndarray) for path in index_files))
    return BlendedDataset(datasets, indices, name, index_files)


def build_splits(
    blends: Mapping[str, Blend], *, split: str, num_samples: Mapping[str, int], builder: GPTDatasetBuilder
) -> dict[str, GPTDataset | BlendedDataset | None]:
    """The three splits of a run, by name.

    Args:
        blends: under ``data`` the sets that ``split`` cuts; or under ``train``, ``valid``, ``test`` each split's own,
            of which all is used.
        split: ``--split``.
        num_samples: samples needed of each split.
        builder: what the sets share.

    Returns:
        None where a split has the weight 0 or no sets, where no samples are needed, or, with a line, where it is empty
        and the run can go without.

    Raises:
        DataError: a pair cannot be read, a set that is needed holds no tokens, the cache cannot be written.
    """
    opened = {
        prefix: IndexedDataset(prefix, builder.impl)
        for prefix in dict.fromkeys(prefix for blend in blends.values() for prefix in blend.used)
    }
    found: dict[str, GPTDataset | BlendedDataset | None] = {}
    for k, name in enumerate(SPLITS):
        found[name] = None
        blend = blends.get("data", blends.get(name))
        needed = num_samples.get(name, 0)
        if blend is None or not needed:
            continue
        parts: list[Part | None] = []
        for prefix in blend.prefixes:
            data = opened.get(prefix)
            if data is None:
                parts.append(None)
                continue
            documents = split_ranges(split, len(data), builder.compat)[k] if "data" in blends else (0, len(data))
            parts.append(None if documents is None else Part(data, documents))
        cut = f"--split {split}" if "data" in blends else f"--{name}-data-path"
        if any(parts):
            found[name] = _build_split(builder, blend, parts, name, needed, cut)
    return found


def _build_split(
    builder: GPTDatasetBuilder, blend: Blend, parts: Sequence[Part | None], name: str, needed: int, cut: str
) -> GPTDataset | BlendedDataset | None:
    if len(parts) == 1:
        (part,) = parts
        assert part is not None
        return builder.build_alone(part, name, needed, cut)
    if len(parts) > MAX_SETS:
        raise DataError(
            f"{len(parts)} sets: a blend holds at most {MAX_SETS}; merge some with `trimegatron data merge`"
        )
    usable = _leave_out_empty(builder, parts, name, cut)
    if not any(usable):
        message = f"{cut} leaves every set's {name} split without a token"
        if is_needed(name, builder.compat):
            raise DataError(f"{message}, but {needed} samples are needed; give it a larger weight, or 0")
        builder.log(f"{message}; going on without a {name} set")
        return None
    given = None if blend.weights is None else np.array(blend.weights)
    if given is not None:
        given[[k for k, part in enumerate(usable) if part is None]] = 0
        return _Mixture(builder, usable, name, needed).by_weights(given)
    return _Mixture(builder, usable, name, needed).by_sizes()


def _leave_out_empty(
    builder: GPTDatasetBuilder, parts: Sequence[Part | None], name: str, cut: str
) -> list[Part | None]:
    """The parts that hold tokens. An empty one of the training set is an error, of the others it is left out."""
    usable: list[Part | None] = []
    for part in parts:
        problem = part.problem() if part is not None else None
        usable.append(part if problem is None else None)
        if part is None or problem is None:
            continue
        message = f"{part.data.prefix}: {cut} over {len(part.data)} documents leaves its {name} split {problem}"
        if name == "train":
            raise DataError(f"{message}; give the set the weight 0, or preprocess more documents")
        builder.log(f"{message}; the others share its part of the {name} set")
    return usable


class _Mixture:
    """One split in the making: the sets that hold tokens, and the number of samples needed."""

    def __init__(self, builder: GPTDatasetBuilder, parts: Sequence[Part | None], name: str, needed: int) -> None:
        self.builder, self.parts, self.name, self.needed = builder, parts, name, needed

    def by_sizes(self) -> BlendedDataset:
        """Without weights: each set once, drawn from in proportion to its samples; where that is not enough, all are
        repeated in that proportion. (Megatron's training stops there.)
        """
        datasets = [None if part is None else self.builder.build(part, self.name, None) for part in self.parts]
        sizes = np.array([0 if dataset is None else len(dataset) for dataset in datasets])
        for part, size in zip(self.parts, sizes, strict=True):
            if part is not None and size == 0 and sizes.any():
                self.builder.log(
                    f"{self.name}: {part.data.prefix} holds {part.num_tokens} tokens, less than one sample of "
                    f"{self.builder.seq_length} and its next token: nothing is drawn from it without a weight"
                )
        if sizes.sum() >= self.needed:
            return self._finish(datasets, normalise(sizes), self.needed)
        self.builder.log(
            f"{self.name}: the sets hold {sizes.sum():,} samples and {self.needed:,} are needed: they are repeated, in "
            "proportion to their sizes"
        )
        tokens = np.array([0 if part is None else part.num_tokens for part in self.parts])
        return self.by_weights(sizes if sizes.any() else tokens)

    def by_weights(self, given: np.ndarray) -> BlendedDataset:
        """Each set built for its share and a little more, then mixed."""
        weights = _normalise_2022(given) if self.builder.compat == 2022 else normalise(given)
        shares = [self.needed * weight for weight in weights.tolist()]
        if self.builder.compat == 2022:
            asked, length = [math.ceil(share * SURPLUS) for share in shares], self.needed
        else:
            shares = [math.ceil(share) for share in shares]
            asked, length = [math.ceil(share * SURPLUS) for share in shares], sum(shares)
        datasets = [
            self.builder.build(part, self.name, samples) if part is not None and samples else None
            for part, samples in zip(self.parts, asked, strict=True)
        ]
        return self._finish(datasets, weights, length)

    def _finish(self, datasets: list[GPTDataset | None], weights: np.ndarray, length: int) -> BlendedDataset:
        sizes = np.array([0 if dataset is None else len(dataset) for dataset in datasets])
        small = self.builder.compat == 2022 and len(datasets) < np.iinfo(np.uint8).max
        description = {
            "weights": [weight.hex() for weight in weights.tolist()],
            "length": length,
            "built": sizes.tolist(),
            "dtype": "uint8" if small else "int16",
        }
        first = next(dataset for dataset in datasets if dataset is not None)
        folder = self.builder.cache_folder(first.data.prefix)
        cache = IndexCache(folder, f"BlendedDataset-{self.name}", BlendIndices, description, self.builder.log)
        indices = cache.load_or_build(
            lambda: _within(blend_by_weights(weights, length, np.uint8 if small else np.int16), sizes)
        )
        assert len(indices.dataset_index) >= self.needed
        self._report(datasets, weights, indices)
        order = {"weights": weights.tolist(), "sets": [None if d is None else d.description for d in datasets]}
        return BlendedDataset(datasets, indices, self.name, cache.files, order)

    def _report(self, datasets: list[GPTDataset | None], weights: np.ndarray, indices: BlendIndices) -> None:
        log, length = self.builder.log, self.builder.seq_length
        drawn = np.bincount(indices.dataset_index[: self.needed], minlength=len(datasets)).tolist()
        log(f"{self.name}: a blend of {len(datasets)} sets, {self.needed:,} samples of {length} tokens needed")
        for part, dataset, weight, count in zip(self.parts, datasets, weights.tolist(), drawn, strict=True):
            if part is None or dataset is None:
                continue
            log(
                f"  {weight:.6g} from {part.data.prefix}: {count:,} samples, {count * length / part.num_tokens:.4g} "
                f"epochs of {part}; {len(dataset):,} built"
            )


def _within(indices: BlendIndices, sizes: np.ndarray) -> BlendIndices:
    """Cut before the first sample that its set does not hold. That is never before the number needed: after N steps a
    set of share w has given at most floor(N·w) + 1, and was built for at least that.
    """
    beyond = np.flatnonzero(indices.dataset_sample_index >= sizes[indices.dataset_index])
    end = int(beyond[0]) if len(beyond) else len(indices.dataset_index)
    return BlendIndices(indices.dataset_index[:end], indices.dataset_sample_index[:end])


def _normalise_2022(given: np.ndarray) -> np.ndarray:
    """Divided by the sum as a plain loop gives it, which may differ in the last bit."""
    total = 0.0
    for weight in given.tolist():
        total += weight
    return np.array([weight / total for weight in given.tolist()])
