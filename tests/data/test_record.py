"""What a checkpoint says about the data, and what is said when the order changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimegatron.config.blend import Blend
from trimegatron.data.blended_dataset import build_splits
from trimegatron.data.cyclic import CyclicDataset
from trimegatron.data.gpt_dataset import GPTDatasetBuilder
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.data.record import DataRecord
from trimegatron.errors import CheckpointError


class Source:
    """Even samples come from one file, odd ones from another."""

    def sources(self, samples: np.ndarray) -> dict[str, int]:
        return {"even": int((samples % 2 == 0).sum()), "odd": int((samples % 2).sum())}


def record(**changes: Any) -> DataRecord:
    train = {"data": "abc", "documents": [0, 9], "num_epochs": 2, "seed": 1}
    description = {"megatron_compat": 2026, "paths": ["x"], "dataloader_type": "single", "train": train}
    for key, value in changes.items():
        (train if key in train else description)[key] = value
    return DataRecord(description, Source())  # type: ignore[arg-type]


def saved(of: DataRecord, consumed: int) -> dict[str, Any]:
    return json.loads(json.dumps(of.state(consumed)))


def test_one_segment_goes_on() -> None:
    state = saved(record(), 7)
    assert (state["first_sample"], state["last_sample"], state["consumed"]) == (0, 7, {"even": 4, "odd": 3})
    again = record(paths=["moved"])
    assert again.resume(state, 7) == []
    assert saved(again, 10)["consumed"] == {"even": 5, "odd": 5}
    assert saved(again, 10)["before"] == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"data": "xyz"}, "the token files are others"),
        ({"num_epochs": 3}, "num_epochs was 2 and is 3"),
        ({"dataloader_type": "cyclic", "data_parallel_size": 2}, "data_parallel_size was None and is 2"),
    ],
)
def test_another_order_is_said_and_begins_a_segment(changes: dict[str, Any], said: str) -> None:
    other = record(**changes)
    (line,) = other.resume(saved(record(), 7), 7)
    assert said in line
    assert "from 7 on" in line
    state = saved(other, 10)
    assert (state["first_sample"], state["consumed"]) == (7, {"even": 1, "odd": 2})
    (before,) = state["before"]
    assert before["consumed"] == {"even": 4, "odd": 3}
    third = record()
    third.resume(state, 10)
    assert [segment["last_sample"] for segment in saved(third, 12)["before"]] == [7, 10]


def test_the_rules_of_the_other_year_are_refused() -> None:
    state = saved(record(megatron_compat=2022), 7)
    with pytest.raises(CheckpointError, match="--megatron-compat 2022 to read on, or --finetune"):
        record().resume(state, 7)


def test_documents_of_samples(tmp_path: Path):
    """Each document repeats its own number, so a sample's tokens are the documents it holds."""
    prefixes = [tmp_path / "a", tmp_path / "b"]
    for base, prefix in zip((0, 100), prefixes, strict=True):
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for document in range(30):
                writer.add_document([base + document] * (3 + document % 7), [3 + document % 7])
    builder = GPTDatasetBuilder(8, 1234, log=lambda line: None)
    for blend in (Blend((str(prefixes[0]),), None), Blend(tuple(map(str, prefixes)), (1.0, 2.0))):
        train = build_splits({"data": blend}, split="1,0,0", num_samples={"train": 60}, builder=builder)["train"]
        assert train is not None
        for dataset in (train, CyclicDataset(train, 2, 2, sharded=True)):
            for samples in ([0], [3, 4, 5, 6], list(range(20, 60))):
                tokens = {int(token) for sample in samples for token in dataset[sample]}
                found = dataset.documents(np.array(samples))
                assert tokens == {
                    100 * prefixes.index(Path(prefix)) + document
                    for prefix, documents in found.items()
                    for document in documents.tolist()
                }
                assert all((np.diff(documents) > 0).all() for documents in found.values())


def test_description_in_words(tmp_path: Path):
    with IndexedDatasetWriter(tmp_path / "a", np.uint16) as writer:
        for document in range(30):
            writer.add_document([document] * 2, [2])
    builder = GPTDatasetBuilder(8, 1234, log=lambda line: None)
    blend = {"data": Blend((str(tmp_path / "a"),), None)}
    train = build_splits(blend, split="1,0,0", num_samples={"train": 6}, builder=builder)["train"]
    assert train is not None
    documents = train.documents(np.array([2]))[str(tmp_path / "a")].tolist()
    record = DataRecord({}, train)
    assert record.describe(2, 1) == f"documents {', '.join(map(str, documents))} of {tmp_path / 'a'}"
    assert record.describe(0, 4).endswith(f" more of {tmp_path / 'a'}")
