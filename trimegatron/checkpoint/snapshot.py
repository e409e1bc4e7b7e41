"""What a checkpoint will hold of one rank, of one moment of the run."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import Any

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

    def on_host(self) -> Snapshot:
        """A copy that training does not change: in the host's memory, without what other ranks write."""
        pieces = {
            name: dataclasses.replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True))
            for name, piece in self.pieces.items()
            if not piece.is_copy
        }
        return Snapshot(pieces, self.state)


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
