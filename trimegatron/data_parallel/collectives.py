"""The two collectives of sharded buffers, in place and asynchronous, by the names that torch gives them.

Gloo has both, for fp32, bf16 and fp16. Inside it sums a copy of all and keeps the shard, in the order of its
all-reduce; the copy back happens in ``wait``. torch 2.13 renamed the two and warns of the old names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def start_reduce_scatter(flat: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> Any:
    """Sum ``flat`` over the group, each rank its own of the equal shards: ``shard`` is this rank's part of ``flat``,
    and what lies around it stays. Returns what is to be waited for."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(shard, flat, group=group, async_op=True)


def start_all_gather(flat: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> Any:
    """Fill ``flat`` with every rank's ``shard``, which is a part of it. Returns what is to be waited for."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(flat, shard, group=group, async_op=True)
