"""Datasets: which exist, what is said when one cannot, and samples against the token stream."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimegatron.data.gpt_dataset import GPTDataset, build_gpt_datasets
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.errors import DataError


def write(prefix: Path, lengths: list[int]) -> None:
    start = 0
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for length in lengths:
            writer.add_document(np.arange(start, start + length), [length])
            start += length


def build(prefix: Path, lines: list[str] | None = None, **changes: Any) -> tuple[GPTDataset | None, ...]:
    settings: dict[str, Any] = {"split": "8,1,1", "seq_length": 4, "seed": 1, "num_samples": (10, 3, 2)}
    return build_gpt_datasets(prefix, log=(lines if lines is not None else []).append, **(settings | changes))


def test_names_lengths_and_tokens(tmp_path: Path) -> None:
    write(tmp_path / "x", [7] * 20)
    datasets = build(tmp_path / "x")
    assert [d.name for d in datasets if d] == ["train", "valid", "test"]
    for dataset, documents, needed in zip(datasets, [(0, 16), (16, 18), (18, 20)], (10, 3, 2), strict=True):
        assert dataset is not None
        assert len(dataset) >= needed
        tokens = np.stack([dataset[i] for i in range(len(dataset))])
        assert (tokens >= documents[0] * 7).all()
        assert (tokens < documents[1] * 7).all()
        with pytest.raises(IndexError):
            dataset[len(dataset)]
        with pytest.raises(IndexError):
            dataset[-1]


def test_each_epoch_reads_each_token_once(tmp_path: Path) -> None:
    write(tmp_path / "x", [3, 0, 8, 1, 1, 4, 7])  # 24 tokens: 5 samples of 4 and 3 left over
    dataset = build(tmp_path / "x", split="1,0,0", num_samples=(5, 0, 0))[0]
    assert dataset is not None
    assert len(dataset) == 5
    inputs = np.concatenate([dataset[i][:-1] for i in range(5)])
    assert len(set(inputs.tolist())) == 20


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
def test_a_micro_batch_at_once_is_the_samples(tmp_path: Path, impl: str) -> None:
    write(tmp_path / "x", [3, 0, 8, 1, 1, 4, 7, 0, 25, 2])
    dataset = build(tmp_path / "x", split="1,0,0", num_samples=(40, 0, 0), impl=impl)[0]
    assert dataset is not None
    everything = dataset.__getitems__(range(len(dataset)))  # type: ignore[arg-type]
    np.testing.assert_array_equal(everything, [dataset[i] for i in range(len(dataset))])
    np.testing.assert_array_equal(dataset.__getitems__([9, 2]), everything[[9, 2]])
    for wrong in ([0, 1, 2, len(dataset)], [-1, 0, 1, 2], [len(dataset)]):
        with pytest.raises(IndexError):
            dataset.__getitems__(wrong)


def test_a_corpus_shorter_than_one_sample_is_repeated(tmp_path: Path) -> None:
    """Megatron of 2022 stops with an assertion, today's waits for ever."""
    write(tmp_path / "x", [3])
    lines: list[str] = []
    train = build(tmp_path / "x", lines, split="1,0,0", seq_length=8, num_samples=(2, 0, 0))[0]
    assert train is not None
    assert train[1].tolist() == [2, 0, 1, 2, 0, 1, 2, 0, 1] or train[1].tolist() == [0, 1, 2] * 3
    assert "6 epochs for 2 samples" in lines[0]


def test_numpy_and_mapping_arguments(tmp_path: Path) -> None:
    write(tmp_path / "x", [7] * 20)
    train, valid, test = build(tmp_path / "x", num_samples={"train": 4})
    assert train is not None
    assert valid is None
    assert test is None
    np.testing.assert_array_equal(train[np.int64(1)], train[1])  # type: ignore[index]


def test_weight_zero_or_no_samples_makes_no_dataset(tmp_path: Path) -> None:
    write(tmp_path / "x", [7] * 20)
    assert [d is None for d in build(tmp_path / "x", split="9,1,0")] == [False, False, True]
    assert [d is None for d in build(tmp_path / "x", num_samples=(10, 0, 0))] == [False, True, True]


def test_split_that_rounds_to_nothing_says_the_numbers(tmp_path: Path) -> None:
    write(tmp_path / "x", [7] * 9)
    lines: list[str] = []
    train, valid, test = build(tmp_path / "x", lines, split="949,50,1", num_samples=(10, 0, 2))
    assert train is not None
    assert (valid, test) == (None, None)
    assert any("949,50,1" in line and "9 documents" in line and "test" in line for line in lines)
    with pytest.raises(DataError, match=r"--split 949,50,1 over 9 documents.*valid.*3 samples"):
        build(tmp_path / "x", split="949,50,1")


def test_documents_without_tokens_are_said(tmp_path: Path) -> None:
    write(tmp_path / "x", [0] * 10)
    with pytest.raises(DataError, match="8 documents without any token"):
        build(tmp_path / "x")


def test_validation_shorter_than_a_sample_repeats_its_tokens(tmp_path: Path) -> None:
    write(tmp_path / "x", [7] * 9 + [3])
    valid = build(tmp_path / "x", split="9,1,0", seq_length=8)[1]
    assert valid is not None
    assert len(valid) >= 3
    for i in range(3):
        assert ((np.diff(valid[i]) % 3) == 1).all()
        assert set(valid[i].tolist()) == {63, 64, 65}


def test_says_epochs_and_sizes(tmp_path: Path) -> None:
    write(tmp_path / "x", [7] * 20)
    lines: list[str] = []
    build(tmp_path / "x", lines, num_samples=(100, 0, 0))
    assert len(lines) == 1
    assert "16 documents [0, 16) of 20" in lines[0]
    assert "112 tokens, 4 epochs for 100 samples" in lines[0]


def test_pickle_maps_the_files_again(tmp_path: Path) -> None:
    write(tmp_path / "x", [700] * 20)
    train = build(tmp_path / "x", num_samples=(2000, 3, 2))[0]
    assert train is not None
    pickled = pickle.dumps(train)
    assert len(pickled) < 2000
    copy = pickle.loads(pickled)
    np.testing.assert_array_equal(copy[5], train[5])
    assert (len(copy), copy.name) == (len(train), "train")


@pytest.mark.parametrize("number", [1, 3, 4, 64])
def test_many_samples_at_once_are_those_one_by_one(tmp_path: Path, number: int) -> None:
    """Documents shorter and longer than a sample, of one token and of none, in several epochs and any order."""
    write(tmp_path / "x", [3, 0, 8, 1, 1, 0, 4, 700, 9])
    train = build(tmp_path / "x", split="1,0,0", num_samples=(500, 0, 0))[0]
    assert train is not None
    for seed in range(20):
        indices = np.random.default_rng(seed).integers(0, len(train), number).tolist()
        samples = train.__getitems__(indices)
        assert samples.dtype == np.int64
        np.testing.assert_array_equal(samples, np.stack([train[i] for i in indices]))
    for wrong in (-1, len(train)):
        with pytest.raises(IndexError):
            train.__getitems__([wrong] * number)
