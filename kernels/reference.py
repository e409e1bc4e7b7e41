"""One eager form of every op, with its formula: what runs on a CPU, and what the kernels are tested against.

Arithmetic in fp32, results in the dtypes the kernels give; differentiable by autograd. Nothing here writes into its
inputs except where a name ends in ``_``. Autograd keeps dropout masks as bool, one byte an element: making them again
would cost more on a CPU than the memory does.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trimegatron.kernels import philox
from trimegatron.kernels.adamw_scalars import AdamWScalar

_ADAMW_CHUNK = 1 << 16  # elements whose temporaries stay in cache


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centred: bool = False) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dimension; with ``zero_centred`` · (weight + 1)."""
    scale = weight.float() + 1.0 if zero_centred else weight.float()
    return F.layer_norm(x.float(), x.shape[-1:], scale, bias.float(), eps).to(x.dtype)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "tanh") -> Tensor:
    """gelu(x + bias)."""
    return F.gelu(x.float() + bias.float(), approximate=approximate).to(x.dtype)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    p: float,
    seed: int,
    sample_numbers: Tensor | None,
    site: int,
    layer: int,
    position_offset: int = 0,
    training: bool = True,
) -> Tensor:
    """residual + dropout(x + bias)."""
    value = x.float()
    if bias is not None:
        value = value + bias.float()
    if training and philox.dropout_threshold(p):
        assert sample_numbers is not None
        keep = philox.hidden_keep_mask(
            x.shape, sample_numbers, p=p, seed=seed, site=site, layer=layer, position_offset=position_offset
        )
        value = torch.where(keep, value * philox.dropout_scale(p), 0.0)
    if residual is not None:
        value = value + residual.float()
    return value.to(x.dtype if residual is None else residual.dtype)


@torch.no_grad()
def bias_gelu_backward_with_activation(
    dy: Tensor, x: Tensor, bias: Tensor, approximate: str = "tanh"
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dbias and gelu(x + bias) again."""
    z = x.float() + bias.float()
    dz = torch.ops.aten.gelu_backward(dy.float(), z, approximate=approximate)
    dbias = dz.flatten(0, -2).sum(dim=0) if dz.dim() > 1 else dz
    return dz.to(x.dtype), dbias.to(bias.dtype), F.gelu(z, approximate=approximate).to(x.dtype)


@functools.lru_cache(maxsize=16)
def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys], True where the key is after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(keys - queries + 1)


def scaled_causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(scale · scores) over the keys j <= i + (sk - sq) of query i; zeros where there are none."""
    return scaled_masked_softmax(scores, _causal_mask(*scores.shape[-2:], scores.device), scale)


def scaled_masked_softmax(scores: Tensor, mask: Tensor | None, scale: float = 1.0) -> Tensor:
    """softmax(scale · scores) over the keys whose mask is False; zeros where there are none."""
    value = scores.float() * scale
    if mask is None:
        return value.softmax(dim=-1).to(scores.dtype)
    y = value.masked_fill(mask, -math.inf).softmax(dim=-1)
    nothing_visible = mask.all(dim=-1, keepdim=True)
    if nothing_visible.any():
        y = y.masked_fill(nothing_visible, 0.0)
    return y.to(scores.dtype)


def attention_dropout(
    probabilities: Tensor,
    *,
    p: float,
    seed: int,
    sample_numbers: Tensor | None,
    layer: int,
    head_offset: int = 0,
    position_offset: int = 0,
    training: bool = True,
) -> Tensor:
    """probabilities · keep / (1 - p)."""
    if not (training and philox.dropout_threshold(p)):
        return probabilities
    assert sample_numbers is not None
    keep = philox.attention_keep_mask(
        probabilities.shape, sample_numbers, p=p, seed=seed, layer=layer, head_offset=head_offset,
        position_offset=position_offset,
    )  # fmt: skip
    return torch.where(keep, probabilities.float() * philox.dropout_scale(p), 0.0).to(probabilities.dtype)


@torch.no_grad()
def cross_entropy_statistics(
    logits: Tensor, target: Tensor, vocab_start: int, num_valid: int, smoothed: bool
) -> Tensor:
    """[3, or 4 where smoothed, *target's shape] fp32 of logits [..., v] over the first ``num_valid`` columns: maximum,
    Σ exp(logit - maximum), the logit of the target (-inf where it is none of them), Σ logit."""
    statistics = torch.zeros(3 + smoothed, *target.shape, device=logits.device)
    statistics[0] = statistics[2] = -math.inf
    if num_valid == 0:
        return statistics
    valid = logits[..., :num_valid].float()
    local = target - vocab_start
    elsewhere = (local < 0) | (local >= num_valid)
    at_target = valid.gather(-1, local.masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    statistics[2] = at_target.masked_fill_(elsewhere, -math.inf)
    if smoothed:
        statistics[3] = valid.sum(dim=-1)
    statistics[0] = maximum = valid.amax(dim=-1)
    level = maximum.masked_fill(maximum == -math.inf, 0.0)
    statistics[1] = (valid - level.unsqueeze(-1)).exp_().sum(dim=-1)
    return statistics


def _cross_entropy_gradient_(
    shifted: Tensor,
    target: Tensor,
    dloss: Tensor,
    vocab_start: int,
    ignore_index: int,
    confidence: float,
    floor: float,
) -> Tensor:
    """(exp(shifted) - floor - confidence · [column = target]) · dloss in the place of shifted, fp32 [..., valid]."""
    probability = shifted.exp_()
    if floor != 0.0:
        probability.sub_(floor)
    if probability.shape[-1]:
        local = (target - vocab_start).unsqueeze(-1)
        here = (local >= 0) & (local < probability.shape[-1])
        # The one-hot is subtracted in fp32, before the single rounding to the logits' dtype.
        probability.scatter_add_(-1, local.masked_fill(~here, 0), here.to(probability.dtype).mul_(-confidence))
    probability.mul_(dloss.unsqueeze(-1))
    ignored = target == ignore_index
    if ignored.any():
        probability[ignored] = 0.0
    return probability


@torch.no_grad()
def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    log_sum_exp: Tensor,
    dloss: Tensor,
    vocab_start: int,
    num_valid: int,
    ignore_index: int,
    confidence: float,
    floor: float,
) -> Tensor:
    """dlogits like logits, zero from column ``num_valid`` on."""
    shifted = logits[..., :num_valid].float() - log_sum_exp.unsqueeze(-1)
    gradient = _cross_entropy_gradient_(shifted, target, dloss, vocab_start, ignore_index, confidence, floor)
    if num_valid == logits.shape[-1]:
        return gradient.to(logits.dtype)
    dlogits = torch.zeros_like(logits)
    dlogits[..., :num_valid] = gradient
    return dlogits


@torch.no_grad()
def cross_entropy_backward_(
    logits: Tensor,
    target: Tensor,
    log_sum_exp: Tensor,
    dloss: Tensor,
    vocab_start: int,
    num_valid: int,
    ignore_index: int,
    confidence: float,
    floor: float,
) -> None:
    """dlogits in the place of logits."""
    valid = logits[..., :num_valid]
    shifted = valid.float().sub_(log_sum_exp.unsqueeze(-1))  # fp32 logits themselves, else a copy
    gradient = _cross_entropy_gradient_(shifted, target, dloss, vocab_start, ignore_index, confidence, floor)
    if gradient.dtype != logits.dtype:
        valid.copy_(gradient)
    logits[..., num_valid:] = 0.0


@torch.no_grad()
def adamw_step_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: Tensor,
    *,
    num_decayed: int,
    low_precision: Tensor | None = None,
) -> None:
    """g = grad · multiplier; m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²;
    p -= lr (m / c₁ / (sqrt(v) / sqrt(c₂) + eps) + wd p), wd only below ``num_decayed``.

    Reads the scalars on the host, which waits for the device where that is not a CPU.
    """
    value = dict(zip(AdamWScalar, scalars.tolist(), strict=True))
    if value[AdamWScalar.FOUND_INF] != 0.0:
        return
    beta1, beta2 = value[AdamWScalar.BETA1], value[AdamWScalar.BETA2]
    n = param.numel()
    # Cuts at num_decayed too, so that a chunk decays as a whole or not at all.
    edges = sorted({*range(0, n, _ADAMW_CHUNK), min(max(num_decayed, 0), n), n})
    for start, stop in itertools.pairwise(edges):
        part = slice(start, stop)
        p, m, v = param[part], exp_avg[part], exp_avg_sq[part]
        g = grad[part].float() * value[AdamWScalar.GRAD_MULTIPLIER]
        m.mul_(beta1).add_(g, alpha=1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        update = v.sqrt().div_(math.sqrt(value[AdamWScalar.BIAS_CORRECTION2])).add_(value[AdamWScalar.EPS])
        torch.div(m, update, out=update).div_(value[AdamWScalar.BIAS_CORRECTION1])
        if start < num_decayed:
            update.add_(p, alpha=value[AdamWScalar.WEIGHT_DECAY])
        p.sub_(update, alpha=value[AdamWScalar.LR])
        if low_precision is not None:
            low_precision[part].copy_(p)


@torch.no_grad()
def sum_of_squares(grad: Tensor) -> Tensor:
    """Σ grad², a 0-dimensional fp32 tensor. Added per chunk and then over chunks, so that long shards lose nothing."""
    parts = [chunk.float().square().sum() for chunk in grad.reshape(-1).split(_ADAMW_CHUNK)]
    return torch.stack(parts).sum()
