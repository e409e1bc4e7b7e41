"""Splits and index maps against the arrays Megatron-LM built: two splits, three lengths, part to five epochs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimegatron.data import indices as indices_module
from trimegatron.data.gpt_dataset import GPTDataset
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indices import Epochs, build_indices
from trimegatron.data.splits import SPLITS, split_ranges
from trimegatron.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
MANIFEST = json.loads((GOLDEN / "indices" / "manifest.json").read_text())
SPLIT_TABLE = json.loads((GOLDEN / "splits.json").read_text())


@pytest.mark.parametrize("name", MANIFEST)
def test_equals_megatron(name: str) -> None:
    entry, golden = MANIFEST[name], np.load(GOLDEN / "indices" / f"{name}.npz")
    data = IndexedDataset(GOLDEN / "tiny" / "tiny_content_document")
    documents = split_ranges(entry["split"], len(data))[SPLITS.index(entry["which"])]
    assert documents is not None
    assert list(documents) == entry["documents"]
    length = entry["seq_length"]
    epochs = Epochs.plan(int(data.sizes[slice(*documents)].sum()), length, entry["num_samples"])
    assert epochs.tokens == entry["tokens_per_epoch"]
    assert (epochs.num_epochs, epochs.separate_last) == (entry["num_epochs"], entry["separate_last_epoch"])
    maps = build_indices(data.sizes, documents, length, epochs, entry["seed"])
    for field, array in maps._asdict().items():
        assert array.dtype == golden[field].dtype, field
        np.testing.assert_array_equal(array, golden[field], err_msg=field)
    dataset = GPTDataset(data, maps, length, entry["which"])
    assert len(dataset) == entry["built_samples"]
    assert len(golden["first5"]) == min(5, len(dataset))
    for i, sample in enumerate(golden["first5"]):
        assert dataset[i].dtype == np.int64
        np.testing.assert_array_equal(dataset[i], sample)


@pytest.mark.parametrize("split", SPLIT_TABLE)
def test_split_ranges_equal_megatron(split: str) -> None:
    for count, expected in SPLIT_TABLE[split].items():
        if expected["new"] == "AssertionError":
            with pytest.raises(ConfigError, match="split"):
                split_ranges(split, int(count))
            continue
        ranges = [None if r is None else list(r) for r in split_ranges(split, int(count))]
        assert ranges == expected["new"], count


@pytest.mark.parametrize("split", SPLIT_TABLE)
def test_split_ranges_equal_megatron_of_2022(split: str) -> None:
    for count, expected in SPLIT_TABLE[split].items():
        bounds = expected["old"]
        for k, found in enumerate(split_ranges(split, int(count), 2022)):
            if found is None:  # a weight of 0
                assert bounds[k] == bounds[k + 1], count
            else:
                assert list(found) == bounds[k : k + 2], count


@pytest.mark.parametrize("split", ["-1,1,0", "90,abc5,5", "0,0,0", "", "nan,1,1", "1,inf,1"])
def test_split_that_makes_no_sense_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="split"):
        split_ranges(split, 100)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    seq_length=st.integers(1, 12),
    num_samples=st.integers(0, 40),
    chunk=st.integers(1, 7),
)
def test_every_sample_is_where_the_stream_says(sizes: list[int], seq_length: int, num_samples: int, chunk: int) -> None:
    """Against the definition: lay the sequences end to end and look up token j·L."""
    lengths = np.array(sizes, np.int32)
    epochs = Epochs.plan(int(lengths.sum()), seq_length, num_samples)
    usual, indices_module._CHUNK = indices_module._CHUNK, chunk
    try:
        maps = build_indices(lengths, (0, len(lengths)), seq_length, epochs, seed=7)
    finally:
        indices_module._CHUNK = usual
    assert sorted(maps.document_index) == sorted(list(range(len(lengths))) * epochs.num_epochs)
    assert sorted(maps.shuffle_index) == list(range(epochs.num_samples))
    assert epochs.num_samples >= num_samples
    stream = [(position, k) for position, d in enumerate(maps.document_index) for k in range(lengths[d])]
    expected = [stream[j * seq_length] for j in range(epochs.num_samples + 1)]
    expected[0] = (0, 0)
    assert [tuple(row) for row in maps.sample_index.tolist()] == expected
    assert (epochs.num_epochs - 1) * epochs.tokens < num_samples * seq_length + 1 or epochs.num_epochs == 1
