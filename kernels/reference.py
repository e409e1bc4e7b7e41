"""One eager form of every op, with its formula: what runs on a CPU, and what the kernels are tested against.

Arithmetic in fp32, results in the dtypes the kernels give; differentiable by autograd. Nothing here writes into its
inputs except ``adamw_step_``. Autograd keeps dropout masks as bool, one byte an element: making them again would cost
more on a CPU than the memory does.
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dimension."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)


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


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    p: float,
    seed: int,
    sample_numbers: Tensor | None,
    layer: int,
    head_offset: int = 0,
    document_starts: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """dropout(softmax(scale · q kᵀ over the visible keys)) v."""
    group, position = q.shape[1] // max(1, k.shape[1]), torch.arange(q.shape[2], device=q.device)
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    hidden = (position > position[:, None])[None, None]
    if document_starts is not None:
        hidden = hidden | (position < document_starts[:, None, :, None])
    probabilities = attention_dropout(
        scaled_masked_softmax(q.float() @ k.mT, hidden, scale), p=p, seed=seed, sample_numbers=sample_numbers,
        layer=layer, head_offset=head_offset, training=training,
    )  # fmt: skip
    return (probabilities @ v).to(q.dtype)


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
