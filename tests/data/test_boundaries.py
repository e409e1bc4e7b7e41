"""Where documents meet inside a sample, against the rules walked through token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trimegatron.data.boundaries import DocumentBoundaries
from trimegatron.data.loader import make_batch
from trimegatron.errors import DataError

EOD = 9
ALL = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}


def walked(tokens: list[int]) -> tuple[list[int], list[list[int]], list[float]]:
    """Positions, visible keys of each query and loss mask of one sample's inputs, by Megatron's words: positions
    restart after an eod; nothing after an eod sees up to and including it; no loss where the input is the eod.
    """
    sees = np.tril(np.ones((len(tokens), len(tokens)), bool))
    positions = list(range(len(tokens)))
    for eod in (i for i, token in enumerate(tokens) if token == EOD):
        sees[eod + 1 :, : eod + 1] = False
        positions[eod + 1 :] = range(len(tokens) - eod - 1)
    return positions, [np.flatnonzero(row).tolist() for row in sees], [float(token != EOD) for token in tokens]


SAMPLES = {  # inputs and the last label
    "none": [1, 2, 3, 4, 5, 6, 7, 8],
    "at the start": [EOD, 2, 3, 4, 5, 6, 7, 8],
    "the last input": [1, 2, 3, 4, 5, 6, EOD, 8],
    "the last label": [1, 2, 3, 4, 5, 6, 7, EOD],
    "start and end": [EOD, 2, 3, EOD, 5, 6, EOD, EOD],
    "twice in a row": [1, 2, EOD, EOD, 5, 6, 7, 8],
    "twice at the start": [EOD, EOD, 3, 4, 5, 6, 7, 8],
    "nothing else": [EOD] * 8,
}


@pytest.mark.parametrize("where", SAMPLES)
def test_one_sample(where: str) -> None:
    sample = SAMPLES[where]
    batch = make_batch(np.array([sample]), [0], DocumentBoundaries(EOD, **ALL))
    positions, sees, loss_mask = walked(sample[:-1])
    assert batch.position_ids is not None and batch.document_starts is not None
    assert batch.position_ids.dtype == batch.document_starts.dtype == torch.int64
    assert batch.position_ids[0].tolist() == positions
    starts = batch.document_starts[0].tolist()
    assert [list(range(start, query + 1)) for query, start in enumerate(starts)] == sees
    assert batch.loss_mask[0].tolist() == loss_mask
    assert batch.labels[0].tolist() == sample[1:]


def test_samples_of_a_batch_do_not_mix() -> None:
    random = np.random.default_rng(0)
    samples = np.where(random.random((50, 33)) < 0.15, EOD, random.integers(0, 9, (50, 33)))
    batch = make_batch(samples, range(50), DocumentBoundaries(EOD, **ALL))
    assert batch.position_ids is not None
    assert batch.position_ids.tolist() == [walked(sample[:-1].tolist())[0] for sample in samples]


def test_only_what_is_asked_for() -> None:
    sample = np.array([[1, EOD, 2, 3]])
    plain = make_batch(sample, [0], DocumentBoundaries(EOD))
    assert (plain.position_ids, plain.document_starts) == (None, None)
    assert plain.loss_mask.tolist() == [[1.0, 1.0, 1.0]]
    positions = make_batch(sample, [0], DocumentBoundaries(EOD, reset_position_ids=True))
    assert positions.position_ids is not None and positions.document_starts is None
    starts = make_batch(sample, [0], DocumentBoundaries(EOD, reset_attention_mask=True))
    assert starts.position_ids is None and starts.document_starts is not None


@pytest.mark.parametrize("name", ALL)
def test_without_an_end_token_it_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"--{name.replace('_', '-')} needs a tokenizer with an end-of-document token"):
        DocumentBoundaries(None, **{name: True})


def test_data_without_ends_is_said() -> None:
    without, with_one = np.array([1, 2, 3]), np.array([1, EOD, 3])
    asked = DocumentBoundaries(EOD, reset_position_ids=True, eod_mask_loss=True)
    line = asked.missing_from([without, without])
    assert line is not None and "first 2 samples hold no end-of-document token (9)" in line
    assert "--eod-mask-loss, --reset-position-ids would act" in line and "--append-eod" in line
    assert asked.missing_from([without, with_one]) is None
    assert DocumentBoundaries(EOD).missing_from([without]) is None
