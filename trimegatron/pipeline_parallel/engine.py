"""One step's forward and backward passes over its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from trimegatron.data.loader import Batch


def run_micro_batches(
    stage: nn.Module, batches: Iterable[Batch], *, backward_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run every micro-batch forward and, with ``backward_scale``, backward from loss · backward_scale.

    Returns:
        The sum of the losses of all unmasked tokens and the number of those tokens, of this rank's micro-batches:
        fp32 scalars on the device, nothing waits for them here.
    """
    loss_sum = num_tokens = None
    for batch in batches:
        loss = stage(
            batch.tokens,
            labels=batch.labels,
            loss_mask=batch.loss_mask,
            sample_numbers=batch.sample_numbers,
            position_ids=batch.position_ids,
            document_starts=batch.document_starts,
        )
        if backward_scale is not None:
            (loss * backward_scale).backward()
        loss, count = loss.detach(), batch.loss_mask.sum()
        loss_sum = loss if loss_sum is None else loss_sum + loss
        num_tokens = count if num_tokens is None else num_tokens + count
    assert loss_sum is not None and num_tokens is not None, "a step has at least one micro-batch"
    return loss_sum, num_tokens
