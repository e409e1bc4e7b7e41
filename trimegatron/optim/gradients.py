"""The global gradient norm, and the one factor that turns accumulated gradients into the ones the optimizer takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.kernels import functional
from trimegatron.mesh import Mesh


def squared_norm(buffer: ParameterBuffer, mesh: Mesh, *, kernels: str, of: torch.Tensor | None = None) -> torch.Tensor:
    """Σ g² over the whole model, replicated parameters counted once: an fp32 scalar on the device, alike on every rank.

    ``of`` is another flat tensor laid out as the gradients; the gradients without it.
    """
    flat = buffer.grads if of is None else of
    total = sum(
        (functional.sum_of_squares(flat[part], impl=kernels) for part in buffer.sharded),
        torch.zeros((), device=flat.device),
    )
    if mesh.tensor.rank == 0:
        total = total + functional.sum_of_squares(flat[buffer.replicated], impl=kernels)
    if mesh.model.group is not None:
        dist.all_reduce(total, group=mesh.model.group)
    return total


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """min(1, max_norm / (norm + 1e-6)), as Megatron; 1 where ``max_norm`` is 0 (clipping is off)."""
    if max_norm <= 0.0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
