"""A parameter knows where it lies in the whole model.

Initialisation, the gradient norm, checkpoints and conversion all need the same facts about a rank's piece of a
parameter, so they are written down once, when the parameter is made: its global (unpadded) shape, which rectangle
of it this rank holds, and its initial distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trimegatron.mesh import Axis


@dataclass(frozen=True)
class ParameterSpec:
    """Where a rank's piece lies in the whole parameter, and how the whole one starts.

    ``extent`` is the part of the local tensor that exists in the global one; what lies beyond is padding (of the
    vocabulary only). The initial values are N(``init_mean``, ``init_std``), constant where ``init_std`` is 0.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    extent: tuple[int, ...]
    is_sharded: bool
    init_mean: float = 0.0
    init_std: float = 0.0
    is_tied_copy: bool = False
    """Another pipeline stage holds the same parameter and answers for it: this one is in no norm, no count and no
    checkpoint, and its gradient is added to the other's."""
    is_partial: bool = False
    """Every rank of the tensor-parallel group holds this parameter alike, but with sequence parallelism each sees only
    its own piece of the sequence: its gradient is summed over the group before anything else uses it."""

    def valid(self, local: torch.Tensor) -> torch.Tensor:
        """The rectangle of ``local`` that exists in the whole parameter, without the padding; a view."""
        for dim, size in enumerate(self.extent):
            local = local.narrow(dim, 0, size)
        return local


def make_parameter(
    global_shape: tuple[int, ...],
    *,
    shard_dim: int | None = None,
    axis: Axis | None = None,
    padded_size: int | None = None,
    init_mean: float = 0.0,
    init_std: float = 0.0,
    is_tied_copy: bool = False,
    is_partial: bool = False,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Parameter:
    """This rank's piece of a parameter, cut along ``shard_dim`` over ``axis``, uninitialised; its spec is
    ``parameter.spec``.

    ``padded_size`` is the size of ``shard_dim`` as it is cut, where that is more than the global size: then the
    last pieces hold less than their size, or nothing, of the whole.
    """
    shape = list(global_shape)
    offsets = [0] * len(shape)
    extent = list(shape)
    if shard_dim is not None:
        axis = axis or Axis()
        padded_size = padded_size or global_shape[shard_dim]
        assert padded_size % axis.size == 0, "checked when the configuration is built"
        size = padded_size // axis.size
        shape[shard_dim] = size
        offsets[shard_dim] = min(axis.rank * size, global_shape[shard_dim])
        extent[shard_dim] = min(size, global_shape[shard_dim] - offsets[shard_dim])
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    spec = ParameterSpec(
        tuple(global_shape),
        tuple(offsets),
        tuple(extent),
        is_sharded=shard_dim is not None,
        init_mean=init_mean,
        init_std=init_std,
        is_tied_copy=is_tied_copy,
        is_partial=is_partial,
    )
    parameter.spec = spec  # type: ignore[attr-defined]
    return parameter


def spec_of(parameter: nn.Parameter) -> ParameterSpec:
    """The spec that :func:`make_parameter` attached."""
    return parameter.spec  # type: ignore[attr-defined]
