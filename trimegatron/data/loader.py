"""From a dataset to micro-batches of tensors, in worker processes. b: micro-batch size; s: sequence length."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from trimegatron.data.cyclic import SampleDataset
from trimegatron.data.sampler import MicroBatchSampler
from trimegatron.errors import DataError


class Batch(NamedTuple):
    """One micro-batch of one data-parallel rank."""

    tokens: torch.Tensor  # int64 [b, s]
    labels: torch.Tensor  # int64 [b, s]: the token after each
    loss_mask: torch.Tensor  # float32 [b, s]: 1 where the loss counts
    sample_numbers: torch.Tensor  # int64 [b]: place of each sample in the run's order, the same for every layout


def make_batch(samples: np.ndarray, sample_numbers: Sequence[int], masked_token: int | None = None) -> Batch:
    """Cut samples into inputs and labels.

    Args:
        samples: int64 [b, s + 1].
        sample_numbers: b of them.
        masked_token: no loss where the *input* is this token (``--eod-mask-loss``, as Megatron).
    """
    tokens = torch.from_numpy(np.ascontiguousarray(samples[:, :-1]))
    labels = torch.from_numpy(np.ascontiguousarray(samples[:, 1:]))
    mask = torch.ones(tokens.shape) if masked_token is None else (tokens != masked_token).float()
    return Batch(tokens, labels, mask, torch.tensor(sample_numbers, dtype=torch.int64))


class _Batches(Dataset):
    """The DataLoader's view: it asks for one micro-batch of indices at a time."""

    def __init__(self, dataset: SampleDataset, masked_token: int | None) -> None:
        self.dataset, self.masked_token = dataset, masked_token

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        return make_batch(np.stack([self.dataset[i] for i in indices]), indices, self.masked_token)


def _unchanged(batch: Any) -> Any:
    return batch  # __getitems__ made the whole batch


def _ignore_signals(_: int) -> None:
    # A scheduler signals every process of the job; the trainer still needs its batches until it has saved and stopped.
    for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def build_loader(
    dataset: SampleDataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 2,
    eod_mask_loss: bool = False,
    eod: int | None = None,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """Micro-batches for one data-parallel rank, from ``consumed_samples`` to the end of the dataset.

    The iterator never just stops: a DataError with the numbers comes where the data ends.

    Raises:
        DataError: nothing is left, at once or at the end; ``eod_mask_loss`` without an end-of-document token.
    """
    if eod_mask_loss and eod is None:
        raise DataError("--eod-mask-loss needs a tokenizer with an end-of-document token; this one has none")
    sampler = MicroBatchSampler(
        len(dataset), consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size
    )
    loader = DataLoader(
        _Batches(dataset, eod if eod_mask_loss else None),
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_unchanged,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
    )
    return _until_the_end(loader, dataset.name, sampler)


def _until_the_end(loader: DataLoader, name: str, sampler: MicroBatchSampler) -> Iterator[Batch]:
    yield from loader
    read = sampler.consumed_samples + len(sampler) * sampler.group
    raise DataError(
        f"the {name} data ends: {read} of {sampler.total_samples} samples are consumed and the next {sampler.group} "
        "are not all there; ask for fewer iterations or give more data"
    )
