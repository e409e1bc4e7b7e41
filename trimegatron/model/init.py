"""Initial weights as a function of (seed, parameter, place), so that they are the same for every cut of the model."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import nn

from trimegatron.tensor_parallel.parameter import spec_of

ROWS_PER_BLOCK = 64
"""Rows that share one random stream. A rank draws whole blocks and keeps what is its own, so the memory it needs is
small.
"""


def normal_rows(seed: int, name: str, start: int, stop: int, num_columns: int) -> np.ndarray:
    """Rows [start, stop) of the parameter's N(0, 1) table, fp32 [stop − start, num_columns].

    Each block of rows is a stream of its own: NumPy's Philox generator, keyed by (seed, name), its counter's high
    word the block.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype=np.uint64)
    first = start // ROWS_PER_BLOCK
    blocks = []
    for block in range(first, -(-stop // ROWS_PER_BLOCK)):
        generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, block], dtype=np.uint64)))
        blocks.append(generator.standard_normal((ROWS_PER_BLOCK, num_columns), dtype=np.float32))
    if not blocks:
        return np.empty((0, num_columns), dtype=np.float32)
    return np.concatenate(blocks)[start - first * ROWS_PER_BLOCK : stop - first * ROWS_PER_BLOCK]


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Fill every parameter of ``model`` with its piece of the initial model; padding is zero."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            continue  # it has no values
        spec = spec_of(parameter)
        parameter.zero_()
        valid = spec.valid(parameter)
        if spec.init_std == 0.0:
            valid.fill_(spec.init_mean)
            continue
        # A row of a 1-D parameter is one number; none of ours is random, so tables have two dimensions.
        (row, column), (num_rows, num_columns) = spec.offsets, spec.extent
        rows = normal_rows(seed, name, row, row + num_rows, spec.global_shape[1])
        piece = torch.from_numpy(rows[:, column : column + num_columns])
        valid.copy_(piece * spec.init_std + spec.init_mean)
