"""One eager form of every op, with its formula: what runs on a CPU, and what the kernels are tested against.

Arithmetic in fp32, results in the dtypes the kernels give. An op with a ``_backward`` beside it has the signature of
the kernels' operator, and is wrapped like it (``ops.py``), so that autograd keeps its inputs in their own dtype and not
the fp32 values in between; the others are differentiable by autograd. Nothing here writes into its inputs except where
a name ends in ``_``. Autograd keeps dropout masks as bool, one byte an element: making them again would cost more on a
CPU than the memory does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from trimegatron.kernels import philox
from trimegatron.kernels.adamw_runs import Run
from trimegatron.kernels.adamw_scalars import AdamWScalar

_CHUNK = 1 << 18  # elements that several passes read: their temporaries stay in cache, and calls stay few
_NORM_ROW = 1 << 11  # elements whose squares are added one after another, in fp32


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dimension, with ``zero_centred`` · (weight + 1);
    beside it mean and 1 / sqrt(var + eps) of each row."""
    scale = weight.float() + 1.0 if zero_centred else weight.float()
    y, mean, rstd = torch.native_layer_norm(x.float(), x.shape[-1:], scale, bias.float(), eps)
    return y.to(x.dtype), mean.flatten(), rstd.flatten()


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    zero_centred: bool = False,
    dresidual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, to which ``dresidual`` is added, dweight, dbias."""
    statistics = (*x.shape[:-1], 1)
    w = weight.float() + 1.0 if zero_centred else weight.float()
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.float(), x.float(), x.shape[-1:], mean.view(statistics), rstd.view(statistics), w, w, [True, True, True]
    )  # the second w stands for the bias, of which only the shape is looked at
    if dresidual is not None:
        dx += dresidual
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def bias_gelu_forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """gelu(x + bias)."""
    return F.gelu(x.float() + bias.float(), approximate=approximate).to(x.dtype)


def bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """dx, dbias."""
    gradient = torch.ops.aten.gelu_backward(dy.float(), x.float() + bias.float(), approximate=approximate)
    return gradient.to(x.dtype), gradient.reshape(-1, x.shape[-1]).sum(dim=0).to(bias.dtype)


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
    return *bias_gelu_backward(dy, x, bias, approximate), bias_gelu_forward(x, bias, approximate)


@functools.lru_cache(maxsize=16)
def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """[queries, keys], True where the key is after the query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(keys - queries + 1)


def hidden_keys(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor | None:
    """``mask`` and, with ``causal``, the keys after each query: True where the scores do not count."""
    if not causal:
        return mask
    later = _causal_mask(*scores.shape[-2:], scores.device)
    return later if mask is None else mask | later


def _softmax_of_visible(scores: Tensor, mask: Tensor, scale: float, has_blind_rows: bool) -> Tensor:
    y = (scores.float() * scale).masked_fill(mask, -math.inf).softmax(dim=-1)
    if has_blind_rows:
        y = y.masked_fill(mask.all(dim=-1, keepdim=True), 0.0)
    return y.to(scores.dtype)


def scaled_causal_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """softmax(scale · scores) over the keys j <= i + (sk - sq) of query i; zeros where there are none."""
    queries, keys = scores.shape[-2:]
    return _softmax_of_visible(scores, _causal_mask(queries, keys, scores.device), scale, queries > keys)


def scaled_masked_softmax_forward(scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · scores) over the keys whose mask is False; zeros where there are none."""
    if mask is None:
        return (scores.float() * scale).softmax(dim=-1).to(scores.dtype)
    return _softmax_of_visible(scores, mask, scale, bool(mask.all(dim=-1).any()))


def scaled_softmax_backward(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """scale · y (dy - Σ dy y): what is masked has y = 0, and so no gradient."""
    del causal
    dx = torch.ops.aten._softmax_backward_data(dy.float(), y.float(), -1, torch.float32)
    return (dx * scale).to(y.dtype)


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
    if not (training and philox.dropout_threshold(p)) or probabilities.numel() == 0:
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
    probabilities = _softmax_of_visible(q.float() @ k.mT, hidden, scale, has_blind_rows=False)
    probabilities = attention_dropout(
        probabilities, p=p, seed=seed, sample_numbers=sample_numbers, layer=layer, head_offset=head_offset,
        training=training,
    )  # fmt: skip
    return (probabilities @ v).to(q.dtype)


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """The rows of logits [rows, v], a cache's worth at a time."""
    step = max(1, _CHUNK // max(1, logits.shape[-1]))
    return (slice(first, first + step) for first in range(0, logits.shape[0], step))


@torch.no_grad()
def cross_entropy_statistics(
    logits: Tensor, target: Tensor, vocab_start: int, num_valid: int, smoothed: bool
) -> Tensor:
    """[3, or 4 where smoothed, *target's shape] fp32 of logits [..., v] over the first ``num_valid`` columns: maximum,
    Σ exp(logit - maximum), the logit of the target (-inf where it is none of them), Σ logit."""
    statistics = torch.zeros(3 + smoothed, target.numel(), device=logits.device)
    statistics[0] = statistics[2] = -math.inf
    if num_valid:
        local = (target - vocab_start).flatten()
        elsewhere = (local < 0) | (local >= num_valid)
        column = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        flat = logits.reshape(target.numel(), logits.shape[-1])
        for rows in _row_chunks(flat):
            valid = flat[rows, :num_valid].float()
            statistics[0, rows] = maximum = valid.amax(dim=-1)
            level = maximum.masked_fill(maximum == -math.inf, 0.0)
            statistics[1, rows] = (valid - level.unsqueeze(-1)).exp_().sum(dim=-1)
            statistics[2, rows] = valid.gather(-1, column[rows]).squeeze(-1)
            if smoothed:
                statistics[3, rows] = valid.sum(dim=-1)
        statistics[2].masked_fill_(elsewhere, -math.inf)
    return statistics.unflatten(1, target.shape)


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
    dlogits = logits.clone(memory_format=torch.contiguous_format)
    words = (vocab_start, num_valid, ignore_index, confidence, floor)
    cross_entropy_backward_(dlogits, target, log_sum_exp, dloss, *words)
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
    """(exp(logit - log_sum_exp) - floor - confidence · [column = target]) · dloss in the place of logits, which are
    contiguous; zero from column ``num_valid`` on and where the target is ignored."""
    flat = logits.view(target.numel(), logits.shape[-1])
    target, log_sum_exp, dloss = (tensor.reshape(-1, 1) for tensor in (target, log_sum_exp, dloss))
    local = target - vocab_start
    here = (local >= 0) & (local < num_valid)
    column = local.masked_fill(~here, 0)
    hot = here.float().mul_(-confidence)
    ignored = target == ignore_index
    some_ignored = bool(ignored.any())
    for rows in _row_chunks(flat):
        valid = flat[rows, :num_valid]
        probability = valid.float().sub_(log_sum_exp[rows]).exp_()  # in the place of fp32 logits, else a copy
        if floor != 0.0:
            probability.sub_(floor)
        if num_valid:
            # The one-hot is subtracted in fp32, before the single rounding to the logits' dtype.
            probability.scatter_add_(-1, column[rows], hot[rows])
        probability.mul_(dloss[rows])
        if some_ignored:  # whatever their logits are, infinite ones too
            probability.masked_fill_(ignored[rows], 0.0)
        if probability.dtype != logits.dtype:
            valid.copy_(probability)
        flat[rows, num_valid:] = 0.0


@torch.no_grad()
def adamw_step_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: Tensor,
    *,
    runs: Iterable[Run],
    low_precision: Tensor | None = None,
) -> None:
    """g = grad · multiplier; m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²;
    p -= lr (m / c₁ / (sqrt(v) / sqrt(c₂) + eps) + wd p), wd only in runs that decay.

    Reads the scalars on the host, which waits for the device where that is not a CPU.
    """
    value = dict(zip(AdamWScalar, scalars.tolist(), strict=True))
    if value[AdamWScalar.FOUND_INF] != 0.0:
        return
    beta1, beta2 = value[AdamWScalar.BETA1], value[AdamWScalar.BETA2]
    correction1, correction2 = value[AdamWScalar.BIAS_CORRECTION1], value[AdamWScalar.BIAS_CORRECTION2]
    for run in runs:
        for done in range(0, run.length, _CHUNK):
            length = min(_CHUNK, run.length - done)
            flat = slice(run.flat + done, run.flat + done + length)
            state = slice(run.state + done, run.state + done + length)
            p, m, v = param[flat if low_precision is None else state], exp_avg[state], exp_avg_sq[state]
            g = grad[flat].float() * value[AdamWScalar.GRAD_MULTIPLIER]
            m.lerp_(g, 1.0 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
            update = v.sqrt().mul_(correction1 / math.sqrt(correction2)).add_(correction1 * value[AdamWScalar.EPS])
            torch.div(m, update, out=update)
            if run.decays:
                update.add_(p, alpha=value[AdamWScalar.WEIGHT_DECAY])
            p.sub_(update, alpha=value[AdamWScalar.LR])
            if low_precision is not None:
                low_precision[flat].copy_(p)


@torch.no_grad()
def sum_of_squares(grad: Tensor) -> Tensor:
    """Σ grad², a 0-dimensional fp32 tensor. Added per row and then over rows, so that long shards lose nothing."""
    flat = grad.reshape(-1)
    in_rows = flat.numel() // _NORM_ROW * _NORM_ROW
    norms = torch.linalg.vector_norm(flat[:in_rows].view(-1, _NORM_ROW), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[in_rows:], dtype=torch.float32)
    return torch.cat([norms, rest.view(1)]).square().sum()
