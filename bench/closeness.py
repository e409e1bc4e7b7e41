"""When two results of one op are equal up to rounding: what tests, tuning and the check on a device ask."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative to the largest value. Triton's interpreter truncates to bf16 where a GPU rounds: one unit in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

_PIECE = 1 << 26  # elements compared at a time, in fp64 and several copies


def close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raises AssertionError, naming ``what``, where they differ by more than ``tolerance`` of the largest value."""
    assert actual.shape == expected.shape, f"{what}: {list(actual.shape)} is not {list(expected.shape)}"
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    pieces = [(actual, expected)]
    if actual.numel() > _PIECE:
        pieces = list(zip(actual.reshape(-1).split(_PIECE), expected.reshape(-1).split(_PIECE), strict=True))
    for ours, theirs in pieces:
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale, msg=lambda text: f"{what}: {text}"
        )
