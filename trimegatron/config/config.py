"""``Config``: all groups together, resolved and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trimegatron.config.checks import check_config, check_global_batch, check_length
from trimegatron.config.flags import build
from trimegatron.config.groups import ModelConfig, ParallelConfig, PrecisionConfig, TrainingConfig
from trimegatron.config.io_groups import CheckpointConfig, DataConfig, LoggingConfig
from trimegatron.config.optimizer_group import OptimizerConfig
from trimegatron.config.recompute import RecomputeConfig
from trimegatron.config.schedule import Schedule
from trimegatron.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole training configuration. Making one fills in what follows from other values and checks every rule.

    Raises:
        ConfigError: the first rule broken.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    data: DataConfig
    precision: PrecisionConfig = dataclasses.field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = dataclasses.field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        training, optimizer = self.training, self.optimizer
        if training.global_batch_size is None:
            samples = training.micro_batch_size * self.parallel.data_parallel_size
            training = dataclasses.replace(training, global_batch_size=samples)
        check_global_batch(training, self.parallel)
        check_length(training)
        if training.train_samples is None:
            if optimizer.lr_decay_iters is None:
                optimizer = dataclasses.replace(optimizer, lr_decay_iters=training.train_iters)
        else:
            if training.train_iters is None:
                iterations = training.batch_sizes.num_steps(training.train_samples)
                training = dataclasses.replace(training, train_iters=iterations)
            if optimizer.lr_decay_samples is None:
                optimizer = dataclasses.replace(optimizer, lr_decay_samples=training.train_samples)
        object.__setattr__(self, "training", training)
        object.__setattr__(self, "optimizer", optimizer)
        check_config(self)

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of a step of the full global batch on one data-parallel rank."""
        return self.micro_batches_of(self.training.global_batch_size)

    def micro_batches_of(self, samples: int) -> int:
        """Forward passes of a step of ``samples`` on one data-parallel rank."""
        return samples // (self.training.micro_batch_size * self.parallel.data_parallel_size)

    @property
    def num_samples(self) -> int:
        """Samples that the whole run consumes."""
        training = self.training
        if training.train_samples is None:
            return training.train_iters * training.global_batch_size
        return training.batch_sizes.within(training.train_samples)[1]

    @property
    def num_model_chunks(self) -> int:
        """Pipeline stages on one rank: more than one where they are interleaved."""
        per_stage = self.parallel.num_layers_per_virtual_pipeline_stage
        if per_stage is None:
            return 1
        return self.model.num_layers // (self.parallel.pipeline_model_parallel_size * per_stage)

    @property
    def schedule(self) -> Schedule:
        """Learning rate and weight decay, counted in samples."""
        optimizer, training = self.optimizer, self.training
        if training.train_samples is None:
            assert optimizer.lr_decay_iters is not None
            decay = optimizer.lr_decay_iters * training.global_batch_size
            warmup: float = optimizer.lr_warmup_iters * training.global_batch_size
            wsd = (optimizer.lr_wsd_decay_iters or 0) * training.global_batch_size
            total = training.train_iters * training.global_batch_size
        else:
            assert optimizer.lr_decay_samples is not None
            decay, warmup, total = optimizer.lr_decay_samples, optimizer.lr_warmup_samples, training.train_samples
            wsd = optimizer.lr_wsd_decay_samples or 0
        if optimizer.lr_warmup_fraction is not None:
            warmup = optimizer.lr_warmup_fraction * decay
        is_wsd = optimizer.lr_decay_style == "WSD"
        return Schedule(
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            style=optimizer.lr_decay_style,
            warmup_samples=warmup,
            decay_samples=decay,
            total_samples=total,
            start_weight_decay=optimizer.start_weight_decay,
            end_weight_decay=optimizer.end_weight_decay,
            weight_decay_style=optimizer.weight_decay_incr_style,
            start_lr=optimizer.lr_warmup_init,
            wsd_style=optimizer.lr_wsd_decay_style if is_wsd else None,
            wsd_samples=wsd if is_wsd else 0,
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Group → field → value, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, dict[str, Any]]) -> Config:
        """The inverse of ``to_dict``. A field that is missing takes its default. Raises ConfigError."""
        unknown = sorted(values.keys() - GROUPS.keys())
        if unknown:
            raise ConfigError(f"Saved configuration: unknown group {unknown[0]!r}. It has {', '.join(GROUPS)}.")
        return cls(**{name: build(group, values.get(name, {})) for name, group in GROUPS.items()})


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "recompute": RecomputeConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}
"""Attribute of ``Config`` → its class, in the order of ``--help``."""
