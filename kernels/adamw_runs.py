"""Which elements one AdamW launch updates, and where each lies: host integers, and the table the kernel reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

ALIGNMENT = 64
"""Runs start at multiples of this many elements and are multiples of it long, so that kernels move 128 bits at a time
whatever came before. The table counts in it, so that int32 reaches 2³⁷ elements."""

TILE = 1024
"""Elements of one program of the kernel: 16 multiples of the alignment."""


class Run(NamedTuple):
    """Consecutive elements of one shard that are treated alike; all but ``decays`` in elements."""

    flat: int
    """Where it starts in the tensors of the whole buffer: gradients, weights of the model."""
    state: int
    """Where it starts in the tensors of the shard: moments, and the master copy where that is not the model's own."""
    length: int
    decays: bool


class AdamWRuns:
    """The runs of one optimizer, in any order. They do not change, so the device gets their table once."""

    def __init__(self, runs: Iterable[Run]):
        self.runs = tuple(runs)
        if any(place % ALIGNMENT for run in self.runs for place in run[:3]):
            raise ValueError(f"runs must start and end at multiples of {ALIGNMENT} elements; got {self.runs}.")
        self.flat_end = max((run.flat + run.length for run in self.runs), default=0)
        self.state_end = max((run.state + run.length for run in self.runs), default=0)
        self._tiles: dict[torch.device, torch.Tensor] = {}

    def tiles(self, device: torch.device) -> torch.Tensor:
        """int32 [tiles, (flat start, state start, length, decays)], the first three in multiples of ``ALIGNMENT``."""
        if device not in self._tiles:
            rows = [
                (
                    (run.flat + done) // ALIGNMENT,
                    (run.state + done) // ALIGNMENT,
                    min(TILE, run.length - done) // ALIGNMENT,
                    run.decays,
                )
                for run in self.runs
                for done in range(0, run.length, TILE)
            ]
            self._tiles[device] = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device)
        return self._tiles[device]
