"""What a checkpoint will hold of one rank, of one moment of the run."""

from __future__ import annotations

import dataclasses
import mmap
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trimegatron.checkpoint.checkpoint import (
    CheckpointState,
    Progress,
    master_pieces,
    model_pieces,
    moment_pieces,
    software_versions,
)
from trimegatron.checkpoint.storage import Piece
from trimegatron.config import Config
from trimegatron.optim.adamw import FlatAdamW


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold of this rank, of one moment; the tensors are views until ``on_host``."""

    pieces: dict[str, Piece]
    state: CheckpointState

    @property
    def iteration(self) -> int:
        return self.state.progress.iteration

    @property
    def num_bytes(self) -> int:
        """What this rank will write."""
        return sum(piece.tensor.nbytes for piece in self.pieces.values() if not piece.is_copy)

    def on_host(self, buffers: dict[str, torch.Tensor]) -> Snapshot:
        """A copy that training does not change, in the host's memory, without what other ranks write.

        Args:
            buffers: what the copy before lies in, by piece; overwritten, and filled up with what is missing.
        """
        pieces = {}
        for name, piece in self.pieces.items():
            if not piece.is_copy and piece.tensor.numel() > 0:
                if name not in buffers:
                    buffers[name] = host_memory_for(piece.tensor)
                pieces[name] = dataclasses.replace(piece, tensor=buffers[name].copy_(piece.tensor.detach()))
        return Snapshot(pieces, self.state)


def host_memory_for(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like it, in memory that processes forked later share. Of any other the system copies each page at the
    first write after a fork, and every loader forks its workers: 1.5 GB took 4 s in place of 0.1.
    """
    memory = mmap.mmap(-1, tensor.nbytes)
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def take_snapshot(
    config: Config,
    progress: Progress,
    optimizer: FlatAdamW,
    *,
    scaler: dict[str, float],
    data: dict[str, Any],
    interval: dict[str, Any],
) -> Snapshot:
    """The run as it is now; JSON's part is a copy already."""
    pieces = model_pieces(optimizer.buffer)
    if not config.checkpoint.no_save_optim:
        pieces |= moment_pieces(optimizer)
        if optimizer.low_precision is not None:
            pieces |= master_pieces(optimizer, "optimizer.master")
    state = CheckpointState(
        Progress(**asdict(progress)),
        optimizer.step_count,
        scaler,
        config.to_dict(),
        data,
        interval,
        software_versions(),
    )
    return Snapshot(pieces, state)
