"""Batches: tokens, labels, mask and sample numbers, in this process and in workers."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from trimegatron.data.boundaries import DocumentBoundaries
from trimegatron.data.gpt_dataset import GPTDataset, build_gpt_datasets
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.data.loader import build_loader, make_batch
from trimegatron.errors import DataError


@pytest.fixture
def dataset(tmp_path: Path) -> GPTDataset:
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(tmp_path / "x", "uint16") as writer:
        for _ in range(30):
            writer.add_document([*random.integers(1, 9, 6), 0], [7])
    settings = {"split": "1,0,0", "seq_length": 5, "seed": 3, "num_samples": (20, 0, 0)}
    train, _, _ = build_gpt_datasets(tmp_path / "x", log=lambda _: None, **settings)  # type: ignore[arg-type]
    assert train is not None
    return train


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_the_samples_in_order(dataset: GPTDataset, num_workers: int) -> None:
    loader = build_loader(
        dataset,
        consumed_samples=4,
        micro_batch_size=2,
        data_parallel_rank=1,
        data_parallel_size=2,
        num_workers=num_workers,
        boundaries=DocumentBoundaries(0, eod_mask_loss=True, reset_position_ids=True, reset_attention_mask=True),
    )
    masked = 0
    for batch, numbers in zip(itertools.islice(loader, 4), [[6, 7], [10, 11], [14, 15], [18, 19]], strict=True):
        samples = torch.from_numpy(np.stack([dataset[i] for i in numbers]))
        assert batch.sample_numbers.tolist() == numbers
        assert (batch.tokens.dtype, batch.labels.dtype) == (torch.int64, torch.int64)
        assert torch.equal(batch.tokens, samples[:, :-1])
        assert torch.equal(batch.labels, samples[:, 1:])
        assert torch.equal(batch.loss_mask, (samples[:, :-1] != 0).float())
        masked += int((batch.loss_mask == 0).sum())
        assert batch.document_starts is not None and batch.position_ids is not None
        assert torch.equal(batch.document_starts + batch.position_ids, torch.arange(5).expand(2, 5))
    assert masked > 0


def test_end_of_data_is_an_error_with_numbers(dataset: GPTDataset) -> None:
    layout = {"micro_batch_size": 16, "data_parallel_rank": 0, "data_parallel_size": 1, "num_workers": 0}
    loader = build_loader(dataset, consumed_samples=0, **layout)
    assert len(dataset) == 41
    next(loader)
    next(loader)
    with pytest.raises(DataError, match=r"32 of 41 samples.*next 16"):
        next(loader)
    with pytest.raises(DataError, match="41 samples and 41 are consumed"):
        build_loader(dataset, consumed_samples=41, **layout)


def test_mask_is_where_the_input_is_the_end_token() -> None:
    sample = np.array([[9, 4, 9, 9]])
    assert make_batch(sample, [0], DocumentBoundaries(9, eod_mask_loss=True)).loss_mask.tolist() == [[0.0, 1.0, 0.0]]
    assert make_batch(sample, [0], DocumentBoundaries(9)).loss_mask.tolist() == [[1.0, 1.0, 1.0]]


def test_every_tensor_is_pinned_when_asked(dataset: GPTDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no page-locked memory, so this watches the calls."""
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    layout = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1, "num_workers": 0}
    boundaries = DocumentBoundaries(0, reset_position_ids=True)
    batch = next(build_loader(dataset, consumed_samples=0, boundaries=boundaries, pin_memory=True, **layout))
    assert batch.document_starts is None
    assert [id(tensor) for tensor in pinned] == [id(part) for part in batch if part is not None]
