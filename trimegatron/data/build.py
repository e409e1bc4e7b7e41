"""From a configuration to the three splits that training reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimegatron.config import Config
from trimegatron.data.blended_dataset import build_splits
from trimegatron.data.cyclic import CyclicDataset, SampleDataset
from trimegatron.data.gpt_dataset import GPTDatasetBuilder
from trimegatron.data.metadata import read_metadata
from trimegatron.data.record import DataRecord
from trimegatron.errors import DataError


@dataclass(frozen=True)
class Datasets:
    """The three splits; one is None where there is nothing to read or nothing that asks for it."""

    train: SampleDataset
    valid: SampleDataset | None
    test: SampleDataset | None


def build_datasets(config: Config, data_parallel_size: int, say: Callable[[str], None]) -> tuple[Datasets, DataRecord]:
    """The splits, with Megatron's number of samples each, and the record of the data for checkpoints."""
    training, data = config.training, config.data
    evaluation = training.eval_iters * training.global_batch_size
    needed = {
        "train": training.train_samples or config.num_samples,
        "valid": (training.train_iters // training.eval_interval + 1) * evaluation,
        "test": evaluation,
    }
    builder = GPTDatasetBuilder(
        data.seq_length, training.seed, data.megatron_compat, data.data_impl, data.data_cache_path, say
    )
    built = build_splits(data.blends(), split=data.split, num_samples=needed, builder=builder)
    if built["train"] is None:
        raise DataError(f"--split ({data.split}) gives the training set no documents. Give it a larger first number")
    if built["valid"] is None and training.eval_iters > 0:
        where = f"--split {data.split}" if data.data_path else "--valid-data-path, which is not given,"
        say(f"no validation: {where} gives it no documents")
    order: dict[str, Any] = {"dataloader_type": data.dataloader_type}
    splits: list[SampleDataset | None] = [built["train"], built["valid"], built["test"]]
    if data.dataloader_type == "cyclic":
        layout = training.micro_batch_size, data_parallel_size
        splits = [d and CyclicDataset(d, *layout, sharded=data.data_sharding) for d in built.values()]
        order |= {"data_sharding": data.data_sharding, "micro_batch_size": layout[0], "data_parallel_size": layout[1]}
    train, valid, test = splits
    assert train is not None
    paths = [prefix for blend in data.blends().values() for prefix in blend.prefixes]
    for prefix in paths:
        rules = read_metadata(prefix).get("megatron_compat", data.megatron_compat)
        if rules != data.megatron_compat:
            say(
                f"note: {prefix} was preprocessed by the rules of {rules}; this run has --megatron-compat "
                f"{data.megatron_compat}"
            )
    description = {
        "megatron_compat": data.megatron_compat,
        "paths": paths,
        **order,
        "train": built["train"].description,
    }
    return Datasets(train, valid, test), DataRecord(description, train)
