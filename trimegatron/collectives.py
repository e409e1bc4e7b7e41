"""The two collectives of sharded tensors, asynchronous, by the names that torch gives them.

Gloo has both, for fp32, bf16 and fp16. Inside it sums a copy of all and keeps the shard, in the order of its
all-reduce; the copy back happens in ``wait``. torch 2.13 renamed the two and warns of the old names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def start_reduce_scatter(whole: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> Any:
    """Sum ``whole`` over the group and keep, in ``shard``, this rank's of its equal parts. Where that is a view of the
    part itself, what lies around it stays. Returns what is to be waited for."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(shard, whole, group=group, async_op=True)


def start_all_gather(whole: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> Any:
    """Fill ``whole`` with every rank's ``shard``, which may be a view of its part. Returns what is to be waited for."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(whole, shard, group=group, async_op=True)
