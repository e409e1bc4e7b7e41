"""``--dry-run --world-size N``: one rank of each pipeline stage, built and walked through a step without its memory.

The ranks are real in all but two things: tensors are on torch's meta device, which have shapes and no values, and the
process group is torch's fake one, which sends nothing. What builds and what steps is the code of a real run, so a
layout that cannot work fails here as there.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trimegatron.communication import CommunicationRecorder, Message
from trimegatron.config import Config, ExplainedConfig
from trimegatron.data.build import Datasets
from trimegatron.data.record import DataRecord
from trimegatron.errors import ConfigError
from trimegatron.mesh import Mesh, close_mesh, cut_mesh, launched_world_size
from trimegatron.meta_device import FusedAttention, LiveBytes, ReadsAsOne
from trimegatron.preflight import with_vocab_size
from trimegatron.tensor_parallel.parameter import ParameterSpec
from trimegatron.tokenizer import Tokenizer, build_tokenizer
from trimegatron.train import build_trainer
from trimegatron.trainer import Trainer

BACKEND = "dry_run"
"""Name of the process groups that send nothing."""
GPT2_VOCAB_SIZE = 50257
"""What GPT2BPETokenizer is assumed to have where its files are not there."""


@dataclass(frozen=True)
class Walk:
    """What one rank's step came to."""

    rank: int
    trainer: Trainer
    activation_bytes: int
    """The most that lives at one time beside weights, main gradients and the optimizer's state."""
    messages: Counter[Message]
    """Of the step."""

    @property
    def mesh(self) -> Mesh:
        return self.trainer.mesh

    @property
    def layers(self) -> list[int]:
        """Global numbers of the layers that are here."""
        names = [piece.name.split(".") for piece in self.trainer.buffer.slices]
        return sorted({int(parts[parts.index("layers") + 1]) for parts in names if "layers" in parts})

    @property
    def num_parameters(self) -> int:
        return sum(piece.parameter.numel() for piece in self.trainer.buffer.slices)

    @property
    def optimizer_bytes(self) -> int:
        optimizer = self.trainer.optimizer
        master = [] if optimizer.low_precision is None else [optimizer.master]
        return sum(tensor.nbytes for tensor in (optimizer.exp_avg, optimizer.exp_avg_sq, *master))

    def gradient_bytes_of(self, chosen: Callable[[ParameterSpec], bool]) -> int:
        """Of the main gradients of some parameters, without what aligns them."""
        buffer = self.trainer.buffer
        return sum(piece.parameter.numel() for piece in buffer.slices if chosen(piece.spec)) * buffer.grads.itemsize


def dry_run(command: ExplainedConfig) -> None:
    """Walk through the stages' steps and print what each comes to.

    Raises:
        ConfigError: the layout does not work.
    """
    if launched_world_size() > 1:
        raise ConfigError("--dry-run is one process. Start it without torchrun, with --world-size N")
    config, notes = assume_vocabulary(command.config)
    for note in (*command.notes, *notes):
        print(f"note: {note}")
    parallel, training = config.parallel, config.training
    print(
        f"dry run of {parallel.world_size} processes: data {parallel.data_parallel_size} × tensor "
        f"{parallel.tensor_model_parallel_size} × pipeline {parallel.pipeline_model_parallel_size} parallel; "
        f"{config.num_micro_batches} micro-batches of {training.micro_batch_size} × {config.data.seq_length} tokens a "
        "step"
    )
    for rank in stage_ranks(config):
        print("\n".join(describe(walk(config, rank))), flush=True)
    print(
        "activations are the most that lives at one time beside the rest: kept for backward, being computed, receive "
        "buffers; not what a kernel or a library holds within. Data, checkpoints and speed are not looked at"
    )


def stage_ranks(config: Config) -> list[int]:
    """The first rank of the first pipeline stage, of a middle one and of the last; other ranks differ in nothing that
    shows here, unless the layers are cut unevenly."""
    stages = config.parallel.pipeline_model_parallel_size
    per_stage = config.parallel.world_size // stages
    return [stage * per_stage for stage in sorted({0, stages // 2, stages - 1})]


def assume_vocabulary(config: Config) -> tuple[Config, list[str]]:
    """The configuration with its vocabulary, also where the tokenizer's files are not at hand; and what was assumed."""
    data, notes = config.data, []
    try:
        tokenizer: Tokenizer = build_tokenizer(
            data.tokenizer_type,
            vocab_file=data.vocab_file,
            merge_file=data.merge_file,
            tokenizer_model=data.tokenizer_model,
            vocab_size=config.model.vocab_size,
        )
    except (ConfigError, OSError, TypeError):
        size = config.model.vocab_size or (GPT2_VOCAB_SIZE if data.tokenizer_type == "GPT2BPETokenizer" else None)
        if size is None:
            raise ConfigError(
                f"--dry-run needs the size of the vocabulary, and the tokenizer of --tokenizer-type "
                f"{data.tokenizer_type} is not there. Give --vocab-size"
            ) from None
        tokenizer = build_tokenizer("NullTokenizer", vocab_size=size - 1)  # and the end of documents
        notes.append(f"the vocabulary is assumed to have {size} words")
    return with_vocab_size(config, tokenizer), notes


def walk(config: Config, rank: int, *, steps: int = 2) -> Walk:
    """Build ``rank`` of the run and step; the last of ``steps`` is looked at, since the first may send more.

    Raises:
        ConfigError: it fails.
    """
    config = without_files(config)
    try:
        with fake_mesh(config, rank) as mesh, ReadsAsOne():
            tokenizer = build_tokenizer("NullTokenizer", vocab_size=(config.model.vocab_size or 1) - 1)
            blank = Blank(config.data.seq_length)
            data = (Datasets(blank, None, None), DataRecord({}, blank))  # type: ignore[arg-type]
            trainer = build_trainer(config, mesh, tokenizer, None, _silent, data=data)
            trainer.model.train()
            batches, optimizer = trainer.loader(trainer.datasets.train, 0), trainer.optimizer
            state = (trainer.buffer.params, trainer.buffer.grads, optimizer.master)
            with LiveBytes(*state, optimizer.exp_avg, optimizer.exp_avg_sq) as live, FusedAttention():
                for _ in range(steps - 1):
                    trainer.train_step(batches)
                with CommunicationRecorder(mesh) as recorder:
                    trainer.train_step(batches)
            return Walk(rank, trainer, live.peak, recorder.messages)
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"--dry-run: rank {rank} cannot step: {type(error).__name__}: {error}") from error


def without_files(config: Config) -> Config:
    """The same run, but nothing of it is read or written, all happens in this process, and what is kept for backward
    is what the kernels keep, also where a CPU or --kernels reference is asked for: the references look at values.

    Every step is one of the full global batch: a ramp's first ones keep and send less."""
    training: dict[str, Any] = {}
    if config.training.rampup_batch_size is not None:
        training = {"rampup_batch_size": None, "train_iters": None}  # the latter follows from the samples
    return dataclasses.replace(
        config,
        training=dataclasses.replace(config.training, **training),
        model=dataclasses.replace(config.model, kernels="auto"),
        data=dataclasses.replace(config.data, num_workers=0),
        checkpoint=dataclasses.replace(config.checkpoint, save=None, load=None),
        logging=dataclasses.replace(config.logging, metrics_file=None, tensorboard_dir=None),
    )


@contextmanager
def fake_mesh(config: Config, rank: int) -> Iterator[Mesh]:
    """The mesh as ``rank`` sees it, on the meta device, with process groups that send nothing."""
    device, parallel = torch.device("meta"), config.parallel
    if parallel.world_size == 1:
        yield Mesh(device)
        return
    from torch.distributed._tools import fake_collectives  # noqa: F401, registers the collectives' meta forms
    from torch.testing._internal.distributed import fake_pg

    if BACKEND not in dist.Backend.backend_list:  # torch's own registration of it knows no meta device
        create = fake_pg._create_fake_pg
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "meta"])
    dist.init_process_group(BACKEND, store=fake_pg.FakeStore(), rank=rank, world_size=parallel.world_size)
    try:
        yield cut_mesh(
            device,
            tensor_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_parallel_size=parallel.pipeline_model_parallel_size,
            store=None,
        )
    finally:
        close_mesh()


class Blank:
    """A training set without end, all of one token."""

    name = "train"

    def __init__(self, seq_length: int):
        self.sample = np.zeros(seq_length + 1, np.int64)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> np.ndarray:
        return self.sample


def describe(walk: Walk) -> list[str]:
    """One rank's sizes and messages, a line each."""
    mesh, buffer = walk.mesh, walk.trainer.buffer
    weights, gradients = buffer.params.nbytes, buffer.grads.nbytes
    total = weights + gradients + walk.optimizer_bytes + walk.activation_bytes
    lines = [
        f"rank {walk.rank} (pipeline {mesh.pipeline.rank}, data {mesh.data.rank}, tensor {mesh.tensor.rank}): layers "
        f"{show_ranges(walk.layers)}, {walk.num_parameters:,} parameters",
        f"  memory {gib(total)}: weights {gib(weights)}, gradients {gib(gradients)}, "
        f"optimizer {gib(walk.optimizer_bytes)}, activations {gib(walk.activation_bytes)} at most",
    ]
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for message, count in walk.messages.items():
        counts[message.axis, message.kind] += count
        sizes[message.axis, message.kind] += count * message.num_bytes
    lines += [
        f"  {axis:<10} {kind:<15} {counts[axis, kind]:>7,} a step, {sizes[axis, kind] / 1e6:>12,.3f} MB"
        for axis, kind in sorted(counts)
    ]
    return lines


def show_ranges(numbers: list[int]) -> str:
    """``0–3, 8–11``; ``none``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"


def _silent(*_: Any) -> None:
    """Nothing that a real run says is said."""
