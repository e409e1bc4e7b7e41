"""The ``cyclic`` order against Megatron's sampler."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimegatron.data.cyclic import CyclicDataset
from trimegatron.data.sampler import MicroBatchSampler
from trimegatron.errors import DataError

CASES = json.loads((Path(__file__).parents[1] / "golden" / "data" / "samplers.json").read_text())


class Numbers:
    """A dataset whose sample i is [i]."""

    name = "train"

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> np.ndarray:
        assert 0 <= index < self.length
        return np.array([index])


def batches(case: Any, rank: int, count: int) -> list[list[int]]:
    """The first micro-batches that a rank reads."""
    dataset = CyclicDataset(Numbers(case.total), case.mbs, case.dp, sharded=case.data_sharding)  # type: ignore[arg-type]
    sampler = iter(MicroBatchSampler(len(dataset), case.consumed, case.mbs, rank, case.dp))
    return [[int(dataset[number][0]) for number in next(sampler)] for _ in range(count)]


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "cyclic"], ids=lambda c: str(dict(c, ranks=None)))
def test_equals_megatron(case: dict[str, Any]) -> None:
    """As far as all of Megatron's ranks go: unsharded, some of them get a micro-batch more."""
    equal = min(map(len, case["ranks"]))
    for rank, expected in enumerate(case["ranks"]):
        assert batches(SimpleNamespace(**case), rank, equal) == expected[:equal]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_each_pass_reads_each_sample_once(more: int, mbs: int, dp: int, sharded: bool) -> None:
    total = mbs * dp + more
    dataset = CyclicDataset(Numbers(total), mbs, dp, sharded=sharded)  # type: ignore[arg-type]
    orders = []
    for number in range(3):
        first = number * dataset.pass_length
        order = dataset.order(np.arange(first, first + dataset.pass_length))
        assert len(set(order.tolist())) == total // (mbs * dp) * (mbs * dp)
        orders.append(order.tolist())
    together = dataset.order(np.arange(3 * dataset.pass_length))
    assert together.tolist() == orders[0] + orders[1] + orders[2]
    if dataset.pass_length >= 16:
        assert orders[0] != orders[1]


def test_smaller_than_a_micro_batch_on_every_rank_says_the_numbers() -> None:
    with pytest.raises(DataError, match=r"holds 7 samples.*takes 8 \(micro-batch 2 × data-parallel 4\)"):
        CyclicDataset(Numbers(7), 2, 4, sharded=True)  # type: ignore[arg-type]
