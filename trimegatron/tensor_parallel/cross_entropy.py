"""Cross entropy over logits that are cut by vocabulary, without gathering them.

Legend: s sequence, b micro-batch, v this rank's columns of the padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trimegatron.kernels import functional


def combine_over_ranks(statistics: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The numbers of a token over all columns, from each rank's: m = max mᵢ, Σ = Σ sᵢ exp(mᵢ − m), target = max
    targetᵢ (−∞ where it is none of a rank's words), and sums of logits where there are any.

    ``statistics`` is [3 or 4, s, b]. One all-gather of them is the only exchange.
    """
    everyone = [torch.empty_like(statistics) for _ in range(group.size())]
    dist.all_gather(everyone, statistics, group=group)
    maxima, sums, targets, *logit_sums = torch.stack(everyone, dim=1)  # each [t, s, b]
    maximum = maxima.amax(dim=0)
    total = (sums * (maxima - maximum).exp()).sum(dim=0)
    return torch.stack([maximum, total, targets.amax(dim=0), *(each.sum(dim=0) for each in logit_sums)])


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    vocab_start: int,
    num_valid: int,
    group: ProcessGroup | None,
    vocab_size: int | None = None,
    label_smoothing: float = 0.0,
    in_place: bool = False,
    kernels: str = "auto",
) -> torch.Tensor:
    """Cross entropy of each token: logits [s, b, v], target [s, b] (global ids) -> [s, b] in fp32; the same on
    every rank.

    Each rank reads its logits once for its share of the statistics of a token. Backward re-makes the softmax from the
    logits, so that nothing of their size is kept beside them. The gradient has the logits' dtype; it is zero in the
    padding.

    Args:
        vocab_start: the global id of this rank's first column.
        num_valid: how many of this rank's columns are words; the rest is padding and takes no probability.
        vocab_size: words over all ranks; needed for ``label_smoothing``.
        in_place: backward may write the gradient into the logits; nothing else may need them.
        kernels: what runs, as ``impl`` of ``functional.cross_entropy``.
    """
    return functional.cross_entropy(
        logits,
        target,
        num_valid=num_valid,
        label_smoothing=label_smoothing,
        in_place=in_place,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        combine=None if group is None else functools.partial(combine_over_ranks, group=group),
        impl=kernels,
    )
