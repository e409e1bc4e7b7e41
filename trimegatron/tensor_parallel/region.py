"""What crosses the border of a tensor-parallel region: the only collectives of tensor and sequence parallelism.

Inside a region each rank works on its part of the features, for the whole sequence. Outside it every rank holds all
features: of the whole sequence, all ranks alike, or with sequence parallelism of its own piece of it.

| | without sequence parallelism | with it |
|---|---|---|
| ``enter`` | nothing | all-gather along the sequence |
| ``leave`` | sum over the ranks (all-reduce) | sum over the ranks, each keeps its piece (reduce-scatter) |

The gradient of either is the other. Source: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models" (2022), section 4.2.2 (f, f̄ and g, ḡ there).

Legend: s sequence, t tensor-parallel size. The sequence is dimension 0, so pieces are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from trimegatron.collectives import start_all_gather, start_reduce_scatter


class Pending(NamedTuple):
    """A tensor that a collective may still be writing to: nobody reads it before ``wait``."""

    tensor: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return self.tensor


@dataclass(frozen=True)
class Region:
    """The border of a tensor-parallel region, as one rank sees it. Without a group there is nothing to cross."""

    group: ProcessGroup | None = None
    sequence_parallel: bool = False

    def enter(self, x: torch.Tensor) -> Pending:
        """Start to make [s, …] of what every rank holds: [s, …], or with sequence parallelism [s/t, …]."""
        if self.group is None or not self.sequence_parallel:
            return Pending(x)
        whole = x.new_empty((x.shape[0] * self.group.size(), *x.shape[1:]))
        return Pending(whole, start_all_gather(whole, x.contiguous(), self.group))

    def leave(self, x: torch.Tensor) -> Pending:
        """Start to add up the ranks' [s, …]: into ``x`` itself, or with sequence parallelism into a new [s/t, …]."""
        if self.group is None:
            return Pending(x)
        if not self.sequence_parallel:
            return Pending(x, dist.all_reduce(x, group=self.group, async_op=True))
        piece = x.new_empty((x.shape[0] // self.group.size(), *x.shape[1:]))
        return Pending(piece, start_reduce_scatter(x.contiguous(), piece, self.group))


class LeaveRegion(torch.autograd.Function):
    """``Region.leave`` forward, ``Region.enter`` backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, region: Region) -> torch.Tensor:
        ctx.region = region
        y = region.leave(x).wait()
        if y is x:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        return ctx.region.enter(dy).wait(), None
