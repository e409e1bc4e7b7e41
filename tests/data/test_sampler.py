"""The ``single`` order against Megatron's sampler, and its one promise: the layout never changes what is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimegatron.data.sampler import MicroBatchSampler
from trimegatron.errors import DataError

CASES = json.loads((Path(__file__).parents[1] / "golden" / "data" / "samplers.json").read_text())


@pytest.mark.parametrize("case", [c for c in CASES if c["kind"] == "single"], ids=str)
def test_equals_megatron(case: dict[str, Any]) -> None:
    for rank, expected in enumerate(case["ranks"]):
        sampler = MicroBatchSampler(case["total"], case["consumed"], case["mbs"], rank, case["dp"])
        assert list(sampler) == expected
        assert len(sampler) == len(expected)


@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(0, 9))
def test_ranks_together_read_consecutive_samples(consumed: int, micro_batch: int, ranks: int, more: int) -> None:
    total = consumed + micro_batch * ranks + more
    per_rank = [list(MicroBatchSampler(total, consumed, micro_batch, rank, ranks)) for rank in range(ranks)]
    assert len({len(batches) for batches in per_rank}) == 1
    read = [i for step in zip(*per_rank, strict=True) for batch in step for i in batch]
    assert read == list(range(consumed, consumed + len(read)))
    assert total - consumed - len(read) < micro_batch * ranks


def test_nothing_left_says_the_numbers() -> None:
    with pytest.raises(DataError, match=r"10 samples and 8 are consumed.*takes 4 more"):
        MicroBatchSampler(10, 8, 2, 0, 2)
