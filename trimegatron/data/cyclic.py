"""``--dataloader-type cyclic``: the samples shuffled anew in each pass, by Megatron's rule.

The rule depends on the layout, so the order does too; ``single`` is the one that does not. Here it is a dataset whose
sample k is the k-th one consumed over the whole run, so that the sampler, which deals consecutive numbers, is the
same for both.

mbs: micro-batch size; dp: data-parallel size; a group is mbs · dp samples, one micro-batch on every rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from trimegatron.data.blended_dataset import BlendedDataset
from trimegatron.data.gpt_dataset import GPTDataset
from trimegatron.errors import DataError


class CyclicDataset:
    """``dataset`` in a new order in each pass, for ever.

    A pass reads (len(dataset) div group) · group samples, each once, so every rank gets equally many. Its permutation
    comes from torch's CPU generator seeded with the number of the pass. Sharded, each rank has a part of the dataset
    of its own and all use the same permutation inside theirs; else the ranks are dealt one permutation in turn.

    Raises:
        DataError: the dataset is smaller than one group.
    """

    def __init__(
        self, dataset: GPTDataset | BlendedDataset, micro_batch_size: int, data_parallel_size: int, *, sharded: bool
    ) -> None:
        self.dataset, self.name = dataset, dataset.name
        self.micro_batch_size, self.data_parallel_size, self.sharded = micro_batch_size, data_parallel_size, sharded
        self.group = micro_batch_size * data_parallel_size
        self.pass_length = len(dataset) // self.group * self.group
        if self.pass_length == 0:
            raise DataError(
                f"the {self.name} set holds {len(dataset)} samples; one micro-batch on every rank takes {self.group} "
                f"(micro-batch {micro_batch_size} × data-parallel {data_parallel_size}): give more data, or use fewer "
                "ranks or a smaller micro-batch"
            )
        self._pass = -1
        self._permutation = np.empty(0, np.int64)

    def __len__(self) -> int:
        """It has no end."""
        return sys.maxsize

    def __getitem__(self, number: int) -> np.ndarray:
        return self.dataset[int(self.order(np.array([number]))[0])]

    def __getitems__(self, numbers: Sequence[int]) -> np.ndarray:
        """The samples that are consumed at ``numbers``, int64 [b, L + 1]."""
        return self.dataset.__getitems__(self.order(np.asarray(numbers, np.int64)).tolist())

    def order(self, numbers: np.ndarray) -> np.ndarray:
        """Which samples of the dataset the ``numbers``-th consumed ones are, int64."""
        passes, within = np.divmod(numbers, self.pass_length)
        batch, inside = np.divmod(within, self.group)
        rank, k = np.divmod(inside, self.micro_batch_size)
        found = np.empty(len(numbers), np.int64)
        for number in np.unique(passes).tolist():
            here = passes == number
            permutation = self._permutation_of(number)
            if self.sharded:
                shard = len(permutation)
                found[here] = rank[here] * shard + permutation[batch[here] * self.micro_batch_size + k[here]]
            else:
                found[here] = permutation[batch[here] * self.group + rank[here] + k[here] * self.data_parallel_size]
        return found

    def _permutation_of(self, number: int) -> np.ndarray:
        if number != self._pass:
            mbs = self.micro_batch_size
            length = self.pass_length // self.data_parallel_size if self.sharded else len(self.dataset) // mbs * mbs
            generator = torch.Generator().manual_seed(number)
            self._permutation, self._pass = torch.randperm(length, generator=generator).numpy(), number
        return self._permutation

    def sources(self, samples: np.ndarray) -> dict[str, int]:
        """How many of ``samples``, numbers in the run's order, come from which prefix."""
        return self.dataset.sources(self.order(samples))

    def documents(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Which documents of which prefix the ``samples``, numbers in the run's order, hold tokens of."""
        return self.dataset.documents(self.order(samples))


SampleDataset = GPTDataset | BlendedDataset | CyclicDataset
"""What a loader reads: ``len``, ``[i]`` → int64 [L + 1], ``__getitems__`` → int64 [b, L + 1], ``name``, ``sources``,
``documents``."""
