"""The squares that make a global norm, and the factor that clips."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trimegatron.kernels import functional


def squared_norms(
    parts: Iterable[tuple[torch.Tensor, bool]], *, device: torch.device, kernels: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ x² over the ``parts`` that decay, and over the others: fp32 scalars on the device; nothing waits for them.

    ``parts`` are those a rank answers for (``ParameterBuffer.counted_grads``); the sum over all ranks is the model's.
    """
    totals = (torch.zeros((), device=device), torch.zeros((), device=device))
    for part, decays in parts:
        totals[0 if decays else 1].add_(functional.sum_of_squares(part, impl=kernels))
    return totals


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)), as Megatron; 1 where ``max_norm`` is 0 (clipping is off)."""
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
