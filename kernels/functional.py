"""The fused operations, forward and backward: what the model and the optimizer call.

``impl`` chooses what runs: ``"auto"`` the Triton kernel for tensors on a GPU and the eager reference for those on a
CPU, ``"triton"`` and ``"reference"`` that one. ``"triton"`` on a CPU needs Triton's interpreter
(``TRITON_INTERPRET=1``) and is refused without it. On the meta device nothing runs, and shapes are the kernel's.

Inputs may be fp32, bf16 or fp16 and of any layout; arithmetic is in
fp32; outputs have the dtype of the first input, ``bias_dropout_add``'s that of the residual; gradients that of their
tensor. Second derivatives through a kernel are refused.

Legend: s sequence, b batch, h hidden, n heads, sq queries, sk keys.
Dropout: a mask is a function of the seed and of where an element is, given by ``sample_numbers`` (int64 [b], on the
tensors' device; None where nothing is dropped), site, layer, and global position, column and head; see ``philox.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from trimegatron.kernels import ops, philox, reference
from trimegatron.kernels.adamw_runs import AdamWRuns, Run
from trimegatron.kernels.adamw_scalars import NUM_ADAMW_SCALARS, AdamWScalar, adamw_scalars
from trimegatron.kernels.philox import Site

MAX_HEAD_SIZE = 128
"""Of ``flash_attention``: what the tiles of its backward pass leave room for in the registers."""

__all__ = [
    "MAX_HEAD_SIZE",
    "NUM_ADAMW_SCALARS",
    "AdamWRuns",
    "AdamWScalar",
    "Run",
    "Site",
    "adamw_scalars",
    "adamw_step_",
    "add_layer_norm",
    "attention_dropout",
    "bias_dropout_add",
    "bias_dropout_add_layer_norm",
    "bias_gelu",
    "bias_gelu_backward_with_activation",
    "cross_entropy",
    "flash_attention",
    "layer_norm",
    "layer_norm_with_residual",
    "scaled_causal_softmax",
    "scaled_masked_softmax",
    "softmax_dropout",
    "sum_of_squares",
    "uses_triton",
]


def uses_triton(impl: str, x: Tensor) -> bool:
    """Whether ``impl`` means the Triton kernel for ``x``. Raises ValueError when it cannot be had."""
    if impl == "reference":
        return False
    if impl == "auto" or x.is_meta:
        return x.is_cuda or x.is_meta
    if impl != "triton":
        raise ValueError(f'impl ("{impl}") must be "auto", "triton" or "reference".')
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f'impl ("triton") must have its tensors on a GPU; got {x.device}. '
            'Use impl="auto" or "reference", or set TRITON_INTERPRET=1 for the interpreter (slow, for tests).'
        )
    return True


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_columns(name: str, vector: Tensor, x: Tensor) -> None:
    _check(
        vector.shape == x.shape[-1:],
        f"{name} ({list(vector.shape)}) must have the length of the input's last dimension; got {list(x.shape)}.",
    )


def _check_dropout(x: Tensor, batch: int, sample_numbers: Tensor | None, seed: int) -> Tensor:
    if sample_numbers is None:
        raise ValueError("sample_numbers (None) must be given where p > 0 in training: the mask is a function of them.")
    _check(
        sample_numbers.dtype == torch.int64 and sample_numbers.shape == (batch,) and sample_numbers.device == x.device,
        f"sample_numbers ({sample_numbers.dtype}, {list(sample_numbers.shape)}, {sample_numbers.device}) must be int64 "
        f"of shape [{batch}] on {x.device}: the number of each sample of the batch over the whole run.",
    )
    _check(0 <= seed < 1 << 32, f"seed ({seed}) must be in [0, 2**32).")
    return sample_numbers


def _check_scores(scores: Tensor, mask: Tensor | None = None) -> None:
    _check(scores.dim() == 4, f"scores ({list(scores.shape)}) must be [batch, heads, queries, keys].")
    if mask is not None:
        fits = mask.dim() == 4 and all(m in (1, s) for m, s in zip(mask.shape, scores.shape, strict=True))
        _check(
            mask.dtype == torch.bool and fits,
            f"mask ({mask.dtype}, {list(mask.shape)}) must be bool and broadcast to {list(scores.shape)}.",
        )


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    _check_columns("weight", weight, x)
    _check_columns("bias", bias, x)
    _check(weight.dtype == bias.dtype, f"bias ({bias.dtype}) must have the weight's dtype ({weight.dtype}).")


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centred: bool = False, *, impl: str = "auto"
) -> Tensor:
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dimension, of any size.

    Args:
        x: [..., h].
        weight, bias: [h], of one dtype, which may differ from x's.
        zero_centred: the factor is weight + 1, so that a weight of zeros leaves the normalised value as it is.
    """
    return layer_norm_with_residual(x, weight, bias, eps, zero_centred, impl=impl)[1]


def layer_norm_with_residual(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, zero_centred: bool = False, *, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """(x, y): x itself, for the residual beside the norm, and its ``layer_norm``. The gradients of the two are added
    in the norm's backward pass, without a pass of their own."""
    _check_norm(x, weight, bias)
    return ops.LayerNorm.apply(x, weight, bias, eps, zero_centred, uses_triton(impl, x))


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "tanh", *, impl: str = "auto") -> Tensor:
    """gelu(x + bias) for x [..., h] and bias [h]; ``approximate`` is "tanh" or "none" (erf), as in PyTorch."""
    _check_columns("bias", bias, x)
    _check(approximate in ("tanh", "none"), f'approximate ("{approximate}") must be "tanh" or "none".')
    return ops.BiasGelu.apply(x, bias, approximate, uses_triton(impl, x))


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
    impl: str = "auto",
) -> Tensor:
    """residual + dropout(x + bias), for x and residual [s, b, h] and bias [h]; without both it is plain dropout.

    The mask is not stored by the kernel. ``position_offset`` is the global position of x[0].
    """
    _check(x.dim() == 3, f"x ({list(x.shape)}) must be [sequence, batch, hidden].")
    if bias is not None:
        _check_columns("bias", bias, x)
    if residual is not None:
        _check(residual.shape == x.shape, f"residual ({list(residual.shape)}) must have x's shape {list(x.shape)}.")
    if training and philox.dropout_threshold(p):
        sample_numbers = _check_dropout(x, x.shape[1], sample_numbers, seed)
    else:
        p, sample_numbers = 0.0, None
        if bias is None and residual is None:
            return x
    if uses_triton(impl, x):
        mask_of = (seed, int(site), layer, position_offset)
        return ops.BiasDropoutAdd.apply(x, bias, residual, sample_numbers, p, mask_of)
    return reference.bias_dropout_add(
        x, bias, residual, p=p, seed=seed, sample_numbers=sample_numbers, site=site, layer=layer,
        position_offset=position_offset,
    )  # fmt: skip


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    zero_centred: bool = False,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(total, y): total = residual + x [..., h] in the residual's dtype, and its ``layer_norm`` in one pass."""
    _check(residual.shape == x.shape, f"residual ({list(residual.shape)}) must have x's shape {list(x.shape)}.")
    _check_norm(x, weight, bias)
    if uses_triton(impl, x):
        norm = (eps, zero_centred)
        return ops.BiasDropoutAddLayerNorm.apply(x, None, residual, weight, bias, None, norm, 0.0, (0, 0, 0, 0))
    total = (residual + x).to(residual.dtype)
    return layer_norm_with_residual(total, weight, bias, eps, zero_centred, impl="reference")


def bias_dropout_add_layer_norm(
    x: Tensor,
    x_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    zero_centred: bool = False,
    *,
    p: float,
    seed: int,
    sample_numbers: Tensor | None,
    site: int,
    layer: int,
    position_offset: int = 0,
    training: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(total, y): total = ``bias_dropout_add`` of x [s, b, h], x_bias [h] and residual, and its ``layer_norm`` with
    ``weight`` and ``bias``, in one pass; both in the residual's dtype."""
    _check(x.dim() == 3, f"x ({list(x.shape)}) must be [sequence, batch, hidden].")
    _check(residual.shape == x.shape, f"residual ({list(residual.shape)}) must have x's shape {list(x.shape)}.")
    if x_bias is not None:
        _check_columns("x_bias", x_bias, x)
    _check_norm(x, weight, bias)
    if training and philox.dropout_threshold(p):
        sample_numbers = _check_dropout(x, x.shape[1], sample_numbers, seed)
    else:
        p, sample_numbers = 0.0, None
    if uses_triton(impl, x):
        mask_of = (seed, int(site), layer, position_offset)
        return ops.BiasDropoutAddLayerNorm.apply(
            x, x_bias, residual, weight, bias, sample_numbers, (eps, zero_centred), p, mask_of
        )
    total = bias_dropout_add(
        x, x_bias, residual, p=p, seed=seed, sample_numbers=sample_numbers, site=site, layer=layer,
        position_offset=position_offset, impl="reference",
    )  # fmt: skip
    return layer_norm_with_residual(total, weight, bias, eps, zero_centred, impl="reference")


def bias_gelu_backward_with_activation(
    dy: Tensor, x: Tensor, bias: Tensor, approximate: str = "tanh", *, impl: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dbias, activation) of ``bias_gelu`` for the incoming gradient ``dy``: for a layer that does not keep its
    activation and needs it next, for the gradient of the weight behind it. Records no gradient."""
    _check_columns("bias", bias, x)
    _check(dy.shape == x.shape, f"dy ({list(dy.shape)}) must have x's shape {list(x.shape)}.")
    _check(approximate in ("tanh", "none"), f'approximate ("{approximate}") must be "tanh" or "none".')
    if uses_triton(impl, x):
        return torch.ops.trimegatron.bias_gelu_backward_with_activation(dy, x, bias, approximate)
    return reference.bias_gelu_backward_with_activation(dy, x, bias, approximate)


def scaled_causal_softmax(scores: Tensor, scale: float = 1.0, *, impl: str = "auto") -> Tensor:
    """softmax(scale · scores) for scores [b, n, sq, sk]; query i sees the keys j <= i + (sk - sq)."""
    _check_scores(scores)
    return ops.ScaledCausalSoftmax.apply(scores, scale, uses_triton(impl, scores))


def scaled_masked_softmax(scores: Tensor, mask: Tensor | None, scale: float = 1.0, *, impl: str = "auto") -> Tensor:
    """softmax(scale · scores) for scores [b, n, sq, sk] over the keys whose mask is False.

    ``mask`` is bool and broadcasts to the scores ([b or 1, n or 1, sq, sk]), True = masked, or None. A row without
    any visible key is zero and has zero gradient.
    """
    _check_scores(scores, mask)
    return ops.ScaledMaskedSoftmax.apply(scores, mask, scale, uses_triton(impl, scores))


def softmax_dropout(
    scores: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    *,
    causal: bool,
    p: float,
    seed: int,
    sample_numbers: Tensor | None,
    layer: int,
    head_offset: int = 0,
    position_offset: int = 0,
    training: bool = True,
    impl: str = "auto",
) -> Tensor:
    """``attention_dropout`` of ``scaled_causal_softmax`` (``causal``) or ``scaled_masked_softmax`` in one pass; with
    ``causal`` and a mask the keys that both leave are visible. The kernel keeps the scores for the backward pass, and
    makes the probabilities and the mask again."""
    _check_scores(scores, mask)
    if training and philox.dropout_threshold(p):
        sample_numbers = _check_dropout(scores, scores.shape[0], sample_numbers, seed)
        if uses_triton(impl, scores):
            mask_of = (seed, layer, head_offset, position_offset)
            return ops.SoftmaxDropout.apply(scores, mask, sample_numbers, scale, causal, p, mask_of)
    if causal and mask is None:
        probabilities = scaled_causal_softmax(scores, scale, impl=impl)
    else:
        probabilities = scaled_masked_softmax(scores, reference.hidden_keys(scores, mask, causal), scale, impl=impl)
    return attention_dropout(
        probabilities, p=p, seed=seed, sample_numbers=sample_numbers, layer=layer, head_offset=head_offset,
        position_offset=position_offset, training=training, impl=impl,
    )  # fmt: skip


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
    impl: str = "auto",
) -> Tensor:
    """Dropout of attention probabilities [b, n, sq, sk]; the offsets are the global head of head 0 and the global
    position of query 0."""
    shape = probabilities.shape
    _check(len(shape) == 4, f"probabilities ({list(shape)}) must be [batch, heads, queries, keys].")
    if not (training and philox.dropout_threshold(p)):
        return probabilities
    sample_numbers = _check_dropout(probabilities, shape[0], sample_numbers, seed)
    if uses_triton(impl, probabilities):
        mask_of = (seed, layer, head_offset, position_offset)
        return ops.AttentionDropout.apply(probabilities, sample_numbers, p, mask_of)
    return reference.attention_dropout(
        probabilities, p=p, seed=seed, sample_numbers=sample_numbers, layer=layer, head_offset=head_offset,
        position_offset=position_offset,
    )  # fmt: skip


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
    impl: str = "auto",
) -> Tensor:
    """Causal attention dropout(softmax(scale · q kᵀ)) v; the kernel holds no matrix of scores, forward or backward.

    The mask is that of ``attention_dropout`` for the same arguments. Sums and the softmax are in fp32, whatever the
    dtype; fp32 inputs are multiplied in IEEE fp32.

    Args:
        q: [b, n, s, d] with d up to ``MAX_HEAD_SIZE``, of any strides.
        k, v: [b, n_kv, s, d] where n_kv divides n: n / n_kv query heads in a row share a head of keys.
        scale: above 0.
        head_offset: the global number of q's head 0.
        document_starts: int64 [b, s], document_starts[i] <= i: query i sees the keys document_starts[i] … i; without
            it all up to i.
    Returns:
        [b, n, s, d] of q's dtype; the kernel's lies in memory as [s, b, n, d], ready for the output projection.
    """
    _check(
        q.dim() == 4 and k.shape == v.shape and k.dim() == 4 and k.shape[::2] == q.shape[::2]
        and k.shape[3] == q.shape[3] and (q.shape[1] % k.shape[1] == 0 if k.shape[1] else q.shape[1] == 0),
        f"q, k and v ({[list(x.shape) for x in (q, k, v)]}) must be [b, n, s, d] and twice [b, n_kv, s, d] where n_kv "
        "divides n.",
    )  # fmt: skip
    _check(q.dtype == k.dtype == v.dtype, f"q, k and v must have one dtype; got {[x.dtype for x in (q, k, v)]}.")
    _check(q.shape[3] <= MAX_HEAD_SIZE, f"q ({list(q.shape)}) must have a head size of at most {MAX_HEAD_SIZE}.")
    _check(scale > 0, f"scale ({scale}) must be above 0.")
    if document_starts is not None:
        _check(
            document_starts.dtype == torch.int64 and document_starts.shape == q.shape[::2]
            and document_starts.device == q.device,
            f"document_starts ({document_starts.dtype}, {list(document_starts.shape)}, {document_starts.device}) must "
            f"be int64 of shape {list(q.shape[::2])} on {q.device}.",
        )  # fmt: skip
    if training and philox.dropout_threshold(p):
        sample_numbers = _check_dropout(q, q.shape[0], sample_numbers, seed)
    else:
        p, sample_numbers = 0.0, None
    if uses_triton(impl, q):
        mask_of = (seed, layer, head_offset)
        return ops.FlashAttention.apply(q, k, v, sample_numbers, document_starts, scale, p, mask_of)
    return reference.flash_attention(
        q, k, v, scale=scale, p=p, seed=seed, sample_numbers=sample_numbers, layer=layer, head_offset=head_offset,
        document_starts=document_starts,
    )  # fmt: skip


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    num_valid: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    upstream: Tensor | None = None,
    in_place: bool = False,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    combine: Callable[[Tensor], Tensor] | None = None,
    impl: str = "auto",
) -> Tensor:
    """log Σ exp(logits) - logits[target] of each token, over the words of a vocabulary that may be cut by columns.

    With ``label_smoothing`` ε a target has the probability 1 - ε and each of the V - 1 other words ε / (V - 1), as in
    Megatron-LM (PyTorch's ε is this one times (V - 1) / V). A target that is no word has an infinite loss.

    Args:
        logits: [..., v], this rank's columns.
        target: [...] int64, global ids; those equal to ``ignore_index`` have zero loss and gradient.
        num_valid: the columns from this one on are padding: no probability, zero gradient. None: there are none.
        upstream: [...] fp32, the gradient the loss is going to receive, where it is known. The kernel then makes the
            gradient together with the loss and reads the logits from memory once; rows that receive another gradient
            are made again. A hint: it changes no result. One backward pass only.
        in_place: backward may write the gradient into the logits, which nothing else may need. One pass only.
        vocab_start: the global id of column 0.
        vocab_size: V over all ranks, for label smoothing; None: ``num_valid``.
        combine: makes the statistics [3, or 4 with label smoothing, ...] of all columns from those of this rank's; see
            ``reference.cross_entropy_statistics``. None: this rank holds them all.
    Returns:
        fp32 [...]. The gradient has the logits' dtype.
    """
    columns = logits.shape[-1]
    num_valid = columns if num_valid is None else num_valid
    vocab_size = num_valid if vocab_size is None else vocab_size
    _check(
        target.dtype == torch.int64 and target.shape == logits.shape[:-1],
        f"target ({target.dtype}, {list(target.shape)}) must be int64 of the logits' leading shape; got logits "
        f"{list(logits.shape)}.",
    )
    _check(0 <= num_valid <= columns, f"num_valid ({num_valid}) must be within the {columns} columns of the logits.")
    _check(
        0.0 <= label_smoothing < 1.0 and (label_smoothing == 0.0 or vocab_size > 1),
        f"label_smoothing ({label_smoothing}) must be in [0, 1), and 0 for a vocabulary of one word ({vocab_size}).",
    )
    if upstream is not None:
        _check(
            upstream.dtype == torch.float32 and upstream.shape == target.shape and not in_place,
            f"upstream ({upstream.dtype}, {list(upstream.shape)}) must be fp32 of the target's shape "
            f"{list(target.shape)}, and given without in_place: rows that receive another gradient need the logits.",
        )
    floor = label_smoothing / (vocab_size - 1) if label_smoothing else 0.0
    words = (vocab_start, num_valid, ignore_index, 1.0 - label_smoothing - floor, floor)
    if not (torch.is_grad_enabled() and logits.requires_grad):
        upstream = None
    return ops.CrossEntropy.apply(logits, target, upstream, words, combine, in_place, uses_triton(impl, logits))


def adamw_step_(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: Tensor,
    *,
    runs: AdamWRuns,
    low_precision: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """One AdamW step over the runs of a shard, in place, in one launch, without waiting for the device.

    g = grad · multiplier; m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²;
    p -= lr (m / c₁ / (sqrt(v) / sqrt(c₂) + eps) + wd p)

    Args:
        param: fp32, the master copy: laid out as the moments beside a low-precision copy, else as the gradients.
        exp_avg, exp_avg_sq: fp32 [elements of the shard].
        grad: fp32, bf16 or fp16 [elements of the buffer].
        scalars: fp32 on the same device, in the order of ``AdamWScalar``; see ``adamw_scalars``.
        runs: which elements, where they lie in the two layouts, and which are decayed.
        low_precision: [elements of the buffer], receives the new param in its dtype.
    """
    flat = [param, exp_avg, exp_avg_sq, grad] + ([] if low_precision is None else [low_precision])
    _check(
        all(t.dim() == 1 and t.is_contiguous() for t in flat),
        f"param, moments, grad and low_precision must be flat and contiguous; got {[list(t.shape) for t in flat]}.",
    )
    whole, shard = grad.shape, exp_avg.shape
    _check(
        exp_avg_sq.shape == shard
        and param.shape == (whole if low_precision is None else shard)
        and (low_precision is None or low_precision.shape == whole),
        f"param must be as long as grad, or as the moments beside low_precision, which is as long as grad; got "
        f"{[list(t.shape) for t in flat]}.",
    )
    _check(
        all(t.dtype == torch.float32 for t in (param, exp_avg, exp_avg_sq)),
        f"param and moments must be fp32; got {[t.dtype for t in flat[:3]]}.",
    )
    _check(
        scalars.dtype == torch.float32 and scalars.shape == (NUM_ADAMW_SCALARS,) and scalars.is_contiguous(),
        f"scalars ({scalars.dtype}, {list(scalars.shape)}) must be fp32 of the {NUM_ADAMW_SCALARS} of AdamWScalar.",
    )
    _check(
        runs.flat_end <= whole.numel() and runs.state_end <= shard.numel(),
        f"runs must end within the tensors; got ends {runs.flat_end} of {whole.numel()} and {runs.state_end} of "
        f"{shard.numel()}.",
    )
    if uses_triton(impl, param):
        tiles = runs.tiles(param.device)
        torch.ops.trimegatron.adamw_step_(param, exp_avg, exp_avg_sq, grad, scalars, tiles, low_precision)
    else:
        reference.adamw_step_(param, exp_avg, exp_avg_sq, grad, scalars, runs=runs.runs, low_precision=low_precision)


def sum_of_squares(grad: Tensor, *, impl: str = "auto") -> Tensor:
    """Σ grad² as a 0-dimensional fp32 tensor on the same device, the same bits every time, without waiting for it."""
    if uses_triton(impl, grad):
        return torch.ops.trimegatron.sum_of_squares(grad)
    return reference.sum_of_squares(grad)
