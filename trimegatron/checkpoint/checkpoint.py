"""Saving and loading what a run is made of: weights, moments, and a page of JSON.

The tensors' names are ``model.NAME``, ``optimizer.exp_avg.NAME``, ``optimizer.exp_avg_sq.NAME`` and, where the
model computes in half precision, ``optimizer.master.NAME``, with the model's parameter names. Their shapes are the
global ones, without padding.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import trimegatron
from trimegatron.checkpoint.directory import STATE, TOKENIZER, readable
from trimegatron.checkpoint.storage import Piece, load_pieces
from trimegatron.checkpoint.stored import stored_pieces
from trimegatron.config import Config
from trimegatron.config.checkpoint_args import CHECKPOINT_ARGS
from trimegatron.config.flags import spell
from trimegatron.config.groups import ModelConfig
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.data_parallel.layout import Shard
from trimegatron.errors import CheckpointError
from trimegatron.mesh import Mesh
from trimegatron.optim.adamw import FlatAdamW

ARCHITECTURE = (*CHECKPOINT_ARGS, "vocab_size")
"""Fields of the model's configuration that a checkpoint fixes."""


@dataclass
class Progress:
    """How far a run is."""

    iteration: int = 0
    consumed_samples: int = 0
    """Samples of all steps: where the data goes on."""
    scheduled_samples: int = 0
    """Samples of the steps that were not skipped: where the learning rate goes on."""
    skipped_iterations: int = 0
    skipped_in_a_row: int = 0
    """The last steps, up to the newest."""
    nan_iterations: int = 0


@dataclass(frozen=True)
class CheckpointState:
    """``state.json``: all of a checkpoint that is not a tensor."""

    progress: Progress
    optimizer_step: int
    scaler: dict[str, float]
    config: dict[str, Any]
    data: dict[str, Any]
    interval: dict[str, Any]
    """What the log line in progress has summed up so far."""
    versions: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> CheckpointState:
        with readable(folder):
            state = json.loads((folder / STATE).read_text())
            return cls(progress=Progress(**state.pop("progress")), **state)

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(asdict(self), indent=1) + "\n")


def software_versions() -> dict[str, str]:
    """What ``state.json`` says wrote it."""
    return {
        "trimegatron": trimegatron.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def model_pieces(buffer: ParameterBuffer) -> dict[str, Piece]:
    """What this rank's optimizer updates of each parameter: all, or the rows of its shards, without padding; views."""
    return _pieces("model", buffer, buffer.params, lambda shard: shard.flat)


def moment_pieces(optimizer: FlatAdamW) -> dict[str, Piece]:
    """The two moments, of the same rows."""
    pieces: dict[str, Piece] = {}
    for name, moment in (("exp_avg", optimizer.exp_avg), ("exp_avg_sq", optimizer.exp_avg_sq)):
        pieces |= _pieces(f"optimizer.{name}", optimizer.buffer, moment, lambda shard: shard.state)
    return pieces


def master_pieces(optimizer: FlatAdamW, prefix: str) -> dict[str, Piece]:
    """The fp32 weights, of the same rows."""
    return _pieces(prefix, optimizer.buffer, optimizer.master, optimizer.master_start)


def _pieces(
    prefix: str, buffer: ParameterBuffer, flat: torch.Tensor, start: Callable[[Shard], int]
) -> dict[str, Piece]:
    """The rectangles of global tensors that ``flat`` holds of what the optimizer updates here; each shard at ``start``.

    A parameter lies in one bucket, a rank has one shard of it, and a shard begins and ends on a row: so a rank has one
    rectangle of each parameter at most.
    """
    return {
        f"{prefix}.{piece.name}": Piece(
            rows,
            piece.spec.global_shape,
            (piece.spec.offsets[0] + first, *piece.spec.offsets[1:]),
            is_copy=not buffer.saves(piece.spec),
        )
        for shard in buffer.updated
        for piece, first, rows in shard.rectangles(flat, start(shard))
    }


def load_checkpoint(
    folder: Path, *, config: Config, optimizer: FlatAdamW, mesh: Mesh, with_optimizer: bool
) -> CheckpointState:
    """Fill the model, and with ``with_optimizer`` the optimizer, whatever layout the checkpoint was saved at.

    Raises:
        CheckpointError: it is of another architecture, lacks a tensor, or cannot be read.
    """
    state = CheckpointState.read(folder)
    check_architecture(folder, state.config, config)
    stored = stored_pieces(folder)
    has_moments = any(name.startswith("optimizer.exp_avg.") for name in stored)
    has_master = any(name.startswith("optimizer.master.") for name in stored)
    if with_optimizer and not has_moments:
        raise CheckpointError(
            f"{folder} holds no optimizer state. Add --no-load-optim to go on without it, or --finetune to start anew "
            "from its weights"
        )
    # The fp32 weights are the truth: the checkpoint's master where it has one, else the model's own.
    source = "optimizer.master" if has_master else "model"
    with readable(folder):
        pieces = master_pieces(optimizer, source)
        if with_optimizer:
            pieces |= moment_pieces(optimizer)
            optimizer.step_count = state.optimizer_step
        load_pieces(folder, pieces, group=mesh.world.group, stored=stored)
    optimizer.refresh_parameters()
    return state


def check_architecture(folder: Path, saved: dict[str, Any], config: Config) -> None:
    """Refuse a checkpoint of another model, naming each difference and the flag that makes this run's that one."""
    mine, theirs = config.to_dict()["model"], saved["model"]
    differences = [
        f"{name} is {theirs.get(name)} there and {mine[name]} here ({flag_for(name, theirs.get(name), config)})"
        for name in ARCHITECTURE
        if theirs.get(name) != mine[name]
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint {folder} is of another model: {'; '.join(differences)}. --use-checkpoint-args takes all of "
            "these sizes from the checkpoint; the vocabulary is the tokenizer's"
        )


def flag_for(name: str, value: Any, config: Config) -> str:
    """What on the command line gives the model's field ``name`` this value."""
    if name == "vocab_size":
        is_null = config.data.tokenizer_type == "NullTokenizer" and config.model.mask_padded_vocab
        return f"--vocab-size {value - 1}" if is_null else f"the tokenizer in the checkpoint's {TOKENIZER}/"
    return spell(ModelConfig, name, value)
