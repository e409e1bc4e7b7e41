"""Cross entropy over logits that are cut by vocabulary, without gathering them.

Legend: s sequence, b micro-batch, v this rank's columns of the padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(logits) − logits[target], over the valid columns of all ranks, in fp32.

    Each rank reads its logits once for three numbers a token: its maximum, its sum of exponentials, and the
    target's logit where it holds it. One all-gather of those is the only exchange. Backward re-makes the softmax
    from the logits, so that nothing of their size is kept beside them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        vocab_start: int,
        num_valid: int,
        group: ProcessGroup | None,
    ) -> torch.Tensor:
        local_target = target - vocab_start
        is_elsewhere = (local_target < 0) | (local_target >= num_valid)
        local_target = local_target.masked_fill(is_elsewhere, 0)
        valid = logits[..., :num_valid].float()
        if num_valid > 0:
            maximum = valid.amax(dim=-1)
            sum_exp = (valid - maximum.unsqueeze(-1)).exp_().sum(dim=-1)
            target_logit = valid.gather(-1, local_target.unsqueeze(-1)).squeeze(-1).masked_fill(is_elsewhere, 0.0)
        else:  # all of this rank's columns are padding
            maximum = torch.full(target.shape, float("-inf"), device=logits.device)
            sum_exp = torch.zeros(target.shape, device=logits.device)
            target_logit = torch.zeros(target.shape, device=logits.device)
        if group is not None:
            maximum, sum_exp, target_logit = combine_over_ranks(maximum, sum_exp, target_logit, group)
        log_sum_exp = sum_exp.log() + maximum
        ctx.save_for_backward(logits, log_sum_exp, local_target, is_elsewhere)
        ctx.num_valid = num_valid
        return log_sum_exp - target_logit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[Any, ...]:
        logits, log_sum_exp, local_target, is_elsewhere = ctx.saved_tensors
        probability = (logits[..., : ctx.num_valid].float() - log_sum_exp.unsqueeze(-1)).exp_()
        # The one-hot is subtracted in fp32, before the single rounding to the logits' dtype.
        if ctx.num_valid > 0:
            one = (~is_elsewhere).to(probability.dtype).unsqueeze(-1)
            probability.scatter_add_(-1, local_target.unsqueeze(-1), -one)
        probability.mul_(dloss.unsqueeze(-1))
        if ctx.num_valid == logits.shape[-1]:
            return probability.to(logits.dtype), None, None, None, None
        dlogits = torch.zeros_like(logits)
        dlogits[..., : ctx.num_valid] = probability
        return dlogits, None, None, None, None


def combine_over_ranks(
    maximum: torch.Tensor, sum_exp: torch.Tensor, target_logit: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three numbers of a token over all columns, from each rank's: m = max mᵢ, Σ = Σ sᵢ exp(mᵢ − m), target = Σ
    targetᵢ.
    """
    local = torch.stack([maximum, sum_exp, target_logit])  # [3, s, b]
    everyone = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(everyone, local, group=group)
    maxima, sums, targets = torch.stack(everyone, dim=1)  # each [t, s, b]
    maximum = maxima.amax(dim=0)
    return maximum, (sums * (maxima - maximum).exp()).sum(dim=0), targets.sum(dim=0)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, vocab_start: int, num_valid: int, group: ProcessGroup | None
) -> torch.Tensor:
    """Cross entropy of each token: logits [s, b, v], target [s, b] (global ids) -> [s, b] in fp32; the same on
    every rank.

    ``vocab_start`` is the global id of this rank's first column, ``num_valid`` how many of its columns are words:
    the rest is padding and takes no probability. The gradient has the logits' dtype; it is zero in the padding. The
    logits are not written to.
    """
    return VocabParallelCrossEntropy.apply(logits, target, vocab_start, num_valid, group)
