"""The kernels as PyTorch operators, and the autograd Functions around them.

``torch.ops.trimegatron.*`` are low-level operators: schema, implementation, shapes for tracing (``register_fake``). The
Functions record the gradient. Of the wrapper styles tried this one costs least per call and still passes ``opcheck``
and ``torch.compile(fullgraph=True)``. Triton is imported when an operator first runs, not here.

Autocast leaves these operators alone: the dtype of every output is stated in the file of its kernel. A second
derivative is refused (``once_differentiable``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimegatron.kernels import reference

# A fragment, so that kernels in other files can add to the namespace. It lives as long as the operators.
_library = torch.library.Library("trimegatron", "FRAGMENT")


def define_op(schema: str, module: str, fake: Callable[..., Any]) -> None:
    """Register ``trimegatron::<name>`` whose implementation is the function of that name in ``kernels/<module>.py``."""
    name = schema.partition("(")[0]

    def run(*args: Any) -> Any:
        implementation = getattr(importlib.import_module(f"trimegatron.kernels.{module}"), name)
        return implementation(*args)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"trimegatron::{name}", fake, lib=_library)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, whatever x is: what the launchers return."""
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def _bias_dropout_add_backward_fake(dout: Tensor, bias: Tensor | None, sample_numbers: Tensor, dtype, *rest: Any):
    return _like(dout, dtype), dout.new_empty(0, dtype=dtype) if bias is None else _like(bias)


def _like_heads(x: Tensor) -> Tensor:
    """[b, n, s, d] laid out as [s, b, n, d]."""
    b, n, s, d = x.shape
    return x.new_empty(s, b, n, d).permute(1, 2, 0, 3)


define_op(
    "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps, bool zero_centred=False)"
    " -> (Tensor, Tensor, Tensor)",
    "layer_norm",
    lambda x, weight, bias, eps, zero_centred=False: (
        _like(x),
        x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32),
        x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32),
    ),
)
define_op(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool zero_centred=False,"
    " Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)",
    "layer_norm",
    lambda dy, x, weight, *rest: (_like(x), _like(weight), _like(weight)),
)
define_op(
    "bias_gelu_forward(Tensor x, Tensor bias, str approximate) -> Tensor",
    "bias_gelu",
    lambda x, bias, approximate: _like(x),
)
define_op(
    "bias_gelu_backward(Tensor dy, Tensor x, Tensor bias, str approximate) -> (Tensor, Tensor)",
    "bias_gelu",
    lambda dy, x, bias, approximate: (_like(x), _like(bias)),
)
define_op(
    "bias_dropout_add_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? sample_numbers, float p, int seed,"
    " int site, int layer, int position_offset) -> Tensor",
    "bias_dropout_add",
    lambda x, bias, residual, *rest: _like(x if residual is None else residual),
)
define_op(
    "bias_dropout_add_backward(Tensor dout, Tensor? bias, Tensor sample_numbers, ScalarType dtype, float p, int seed,"
    " int site, int layer, int position_offset) -> (Tensor, Tensor)",
    "bias_dropout_add",
    _bias_dropout_add_backward_fake,
)
define_op(
    "column_sum(Tensor x, ScalarType dtype) -> Tensor",
    "column_sum",
    lambda x, dtype: x.new_empty(x.shape[-1], dtype=dtype),
)
define_op(
    "scaled_causal_softmax_forward(Tensor scores, float scale) -> Tensor",
    "softmax",
    lambda scores, scale: _like(scores),
)
define_op(
    "scaled_masked_softmax_forward(Tensor scores, Tensor? mask, float scale) -> Tensor",
    "softmax",
    lambda scores, mask, scale: _like(scores),
)
define_op(
    "scaled_softmax_backward(Tensor dy, Tensor y, float scale, bool causal) -> Tensor",
    "softmax",
    lambda dy, y, scale, causal: _like(y),
)
define_op(
    "softmax_dropout_forward(Tensor scores, Tensor? mask, Tensor sample_numbers, float scale, bool causal, float p,"
    " int seed, int layer, int head_offset, int position_offset) -> (Tensor, Tensor)",
    "softmax",
    lambda scores, *rest: (_like(scores), scores.new_empty(2, scores.shape[:-1].numel(), dtype=torch.float32)),
)
define_op(
    "softmax_dropout_backward(Tensor dy, Tensor scores, Tensor? mask, Tensor statistics, Tensor sample_numbers,"
    " float scale, bool causal, float p, int seed, int layer, int head_offset, int position_offset) -> Tensor",
    "softmax",
    lambda dy, scores, *rest: _like(scores),
)
define_op(
    "attention_dropout(Tensor x, Tensor sample_numbers, float p, int seed, int layer, int head_offset,"
    " int position_offset) -> Tensor",
    "attention_dropout",
    lambda x, *rest: _like(x),
)
define_op(
    "flash_attention_forward(Tensor q, Tensor k, Tensor v, Tensor? sample_numbers, Tensor? document_starts,"
    " float scale, float p, int seed, int layer, int head_offset) -> (Tensor, Tensor)",
    "flash_attention",
    lambda q, *rest: (_like_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
define_op(
    "flash_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " Tensor? sample_numbers, Tensor? document_starts, float scale, float p, int seed, int layer, int head_offset)"
    " -> (Tensor, Tensor, Tensor)",
    "flash_attention_backward",
    lambda dout, q, k, v, *rest: (_like_heads(q), _like_heads(k), _like_heads(v)),
)
define_op(
    "adamw_step_(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad, Tensor scalars,"
    " Tensor tiles, Tensor(d!)? low_precision) -> ()",
    "adamw",
    lambda *args: None,
)
define_op(
    "sum_of_squares(Tensor grad) -> Tensor",
    "adamw",
    lambda grad: grad.new_empty((), dtype=torch.float32),
)
define_op(
    "bias_dropout_add_layer_norm_forward(Tensor x, Tensor? x_bias, Tensor residual, Tensor weight, Tensor bias,"
    " Tensor? sample_numbers, float eps, bool zero_centred, float p, int seed, int site, int layer,"
    " int position_offset) -> (Tensor, Tensor, Tensor, Tensor)",
    "add_layer_norm",
    lambda x, x_bias, residual, *rest: (
        _like(residual),
        _like(residual),
        x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32),
        x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32),
    ),
)
define_op(
    "bias_dropout_add_layer_norm_backward(Tensor? dtotal, Tensor dy, Tensor total, Tensor weight, Tensor mean,"
    " Tensor rstd, Tensor? x_bias, Tensor? sample_numbers, ScalarType dtype, bool zero_centred, float p, int seed,"
    " int site, int layer, int position_offset) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "add_layer_norm",
    lambda dtotal, dy, total, weight, mean, rstd, x_bias, sample_numbers, dtype, *rest: (
        _like(total),
        total.new_empty(0, dtype=dtype) if sample_numbers is None else _like(total, dtype),
        _like(weight),
        _like(weight),
        total.new_empty(0, dtype=dtype) if x_bias is None else _like(x_bias),
    ),
)
define_op(
    "bias_gelu_backward_with_activation(Tensor dy, Tensor x, Tensor bias, str approximate) -> (Tensor, Tensor, Tensor)",
    "bias_gelu",
    lambda dy, x, bias, approximate: (_like(x), _like(bias), _like(x)),
)
_CROSS_ENTROPY_WORDS = "int vocab_start, int num_valid, int ignore_index, float confidence, float floor"
define_op(
    "cross_entropy_statistics(Tensor logits, Tensor target, int vocab_start, int num_valid, bool smoothed) -> Tensor",
    "cross_entropy",
    lambda logits, target, vocab_start, num_valid, smoothed: logits.new_empty(
        3 + smoothed, *target.shape, dtype=torch.float32
    ),
)
define_op(
    "cross_entropy_forward(Tensor logits, Tensor target, Tensor? upstream, int num_valid, int ignore_index,"
    " float confidence, float floor) -> (Tensor, Tensor, Tensor)",
    "cross_entropy",
    lambda logits, target, upstream, *words: (
        logits.new_empty(target.shape, dtype=torch.float32),
        logits.new_empty(target.shape, dtype=torch.float32),
        logits.new_empty(0) if upstream is None else _like(logits),
    ),
)
define_op(
    "cross_entropy_backward(Tensor logits, Tensor target, Tensor log_sum_exp, Tensor dloss,"
    f" {_CROSS_ENTROPY_WORDS}) -> Tensor",
    "cross_entropy",
    lambda logits, *rest: _like(logits),
)
define_op(
    "cross_entropy_backward_(Tensor(a!) logits, Tensor target, Tensor log_sum_exp, Tensor dloss,"
    f" {_CROSS_ENTROPY_WORDS}) -> ()",
    "cross_entropy",
    lambda *args: None,
)
define_op(
    "cross_entropy_mend_(Tensor(a!) dlogits, Tensor logits, Tensor target, Tensor log_sum_exp, Tensor dloss,"
    f" Tensor upstream, {_CROSS_ENTROPY_WORDS}) -> ()",
    "cross_entropy",
    lambda *args: None,
)


def _kernels(triton: bool) -> Any:
    """Where the forward and backward of an op are: the Triton operators, or the eager ones of the same signatures."""
    return torch.ops.trimegatron if triton else reference


class LayerNorm(torch.autograd.Function):
    """x itself and its norm, so that what comes back along a residual is added where the norm's gradient is made."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centred: bool, triton: bool
    ) -> tuple[Tensor, Tensor]:
        y, mean, rstd = _kernels(triton).layer_norm_forward(x, weight, bias, eps, zero_centred)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.zero_centred, ctx.triton = zero_centred, triton
        ctx.set_materialize_grads(False)
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dresidual: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return dresidual, None, None, None, None, None
        gradients = _kernels(ctx.triton).layer_norm_backward(dy, *ctx.saved_tensors, ctx.zero_centred, dresidual)
        return *gradients, None, None, None


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str, triton: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate, ctx.triton = approximate, triton
        return _kernels(triton).bias_gelu_forward(x, bias, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dbias = _kernels(ctx.triton).bias_gelu_backward(dy, *ctx.saved_tensors, ctx.approximate)
        return dx, dbias, None, None


class BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        sample_numbers: Tensor | None,
        p: float,
        mask_of: tuple[int, int, int, int],  # seed, site, layer, position_offset
    ) -> Tensor:
        ctx.save_for_backward(bias, sample_numbers)
        ctx.p, ctx.mask_of, ctx.dtype = p, mask_of, x.dtype
        return torch.ops.trimegatron.bias_dropout_add_forward(x, bias, residual, sample_numbers, p, *mask_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        bias, sample_numbers = ctx.saved_tensors
        needs_x, needs_bias, needs_residual = ctx.needs_input_grad[:3]
        dx = dbias = None
        if ctx.p == 0.0:  # the gradient is the incoming one; only the bias needs a pass
            dx = dout.to(ctx.dtype) if needs_x else None
            dbias = torch.ops.trimegatron.column_sum(dout, bias.dtype) if needs_bias else None
        elif needs_x or needs_bias:
            summed = bias if needs_bias else None
            dx, dbias = torch.ops.trimegatron.bias_dropout_add_backward(
                dout, summed, sample_numbers, ctx.dtype, ctx.p, *ctx.mask_of
            )
        return dx, dbias if needs_bias else None, dout if needs_residual else None, None, None, None


class ScaledCausalSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, triton: bool) -> Tensor:
        y = _kernels(triton).scaled_causal_softmax_forward(scores, scale)
        ctx.save_for_backward(y)
        ctx.scale, ctx.triton = scale, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _kernels(ctx.triton).scaled_softmax_backward(dy, *ctx.saved_tensors, ctx.scale, True), None, None


class ScaledMaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float, triton: bool) -> Tensor:
        y = _kernels(triton).scaled_masked_softmax_forward(scores, mask, scale)
        ctx.save_for_backward(y)
        ctx.scale, ctx.triton = scale, triton
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _kernels(ctx.triton).scaled_softmax_backward(dy, *ctx.saved_tensors, ctx.scale, False), None, None, None


class SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        sample_numbers: Tensor,
        scale: float,
        causal: bool,
        p: float,
        mask_of: tuple[int, int, int, int],  # seed, layer, head_offset, position_offset
    ) -> Tensor:
        ctx.call = (scale, causal, p, *mask_of)
        y, statistics = torch.ops.trimegatron.softmax_dropout_forward(scores, mask, sample_numbers, *ctx.call)
        ctx.save_for_backward(scores, mask, statistics, sample_numbers)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dscores = torch.ops.trimegatron.softmax_dropout_backward(dy, *ctx.saved_tensors, *ctx.call)
        return dscores, None, None, None, None, None, None


class AttentionDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        probabilities: Tensor,
        sample_numbers: Tensor,
        p: float,
        mask_of: tuple[int, int, int, int],  # seed, layer, head_offset, position_offset
    ) -> Tensor:
        ctx.save_for_backward(sample_numbers)
        ctx.p, ctx.mask_of = p, mask_of
        return torch.ops.trimegatron.attention_dropout(probabilities, sample_numbers, p, *mask_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.trimegatron.attention_dropout(dy, *ctx.saved_tensors, ctx.p, *ctx.mask_of), None, None, None


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sample_numbers: Tensor | None,
        document_starts: Tensor | None,
        scale: float,
        p: float,
        mask_of: tuple[int, int, int],  # seed, layer, head_offset
    ) -> Tensor:
        places = (sample_numbers, document_starts)
        out, lse = torch.ops.trimegatron.flash_attention_forward(q, k, v, *places, scale, p, *mask_of)
        ctx.save_for_backward(q, k, v, out, lse, *places)
        ctx.scale, ctx.p, ctx.mask_of = scale, p, mask_of
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.trimegatron.flash_attention_backward(
            dout, *ctx.saved_tensors, ctx.scale, ctx.p, *ctx.mask_of
        )
        return *gradients, None, None, None, None, None


class BiasDropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_bias: Tensor | None,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        sample_numbers: Tensor | None,
        norm: tuple[float, bool],  # eps, zero_centred
        p: float,
        mask_of: tuple[int, int, int, int],  # seed, site, layer, position_offset
    ) -> tuple[Tensor, Tensor]:
        total, y, mean, rstd = torch.ops.trimegatron.bias_dropout_add_layer_norm_forward(
            x, x_bias, residual, weight, bias, sample_numbers, *norm, p, *mask_of
        )
        ctx.save_for_backward(total, weight, mean, rstd, x_bias, sample_numbers)
        ctx.arguments = (x.dtype, norm[1], p, *mask_of)
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, mean, rstd, x_bias, sample_numbers = ctx.saved_tensors
        needs_x, needs_x_bias = ctx.needs_input_grad[:2]
        dresidual, dx, dweight, dbias, dx_bias = torch.ops.trimegatron.bias_dropout_add_layer_norm_backward(
            dtotal, torch.zeros_like(total) if dy is None else dy, total, weight, mean, rstd,
            x_bias if needs_x_bias else None, sample_numbers, *ctx.arguments,
        )  # fmt: skip
        if sample_numbers is None:
            dx = dresidual.to(ctx.arguments[0]) if needs_x else None
        return dx, dx_bias if needs_x_bias else None, dresidual, dweight, dbias, None, None, None, None


class CrossEntropy(torch.autograd.Function):
    """One Function for kernels and reference, so that both keep nothing of the logits' size beside them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        upstream: Tensor | None,
        words: tuple[int, int, int, float, float],  # vocab_start, num_valid, ignore_index, confidence, floor
        combine: Callable[[Tensor], Tensor] | None,
        in_place: bool,
        triton: bool,
    ) -> Tensor:
        vocab_start, num_valid, ignore_index, confidence, floor = words
        dlogits = logits.new_empty(0)
        if triton and combine is None:
            loss, log_sum_exp, dlogits = torch.ops.trimegatron.cross_entropy_forward(
                logits, target, upstream, num_valid, ignore_index, confidence, floor
            )
        else:
            statistics = _kernels(triton).cross_entropy_statistics(logits, target, vocab_start, num_valid, floor != 0.0)
            if combine is not None:
                statistics = combine(statistics)
            maximum, sum_exp, target_logit = statistics[:3]
            log_sum_exp = sum_exp.log() + maximum
            loss = log_sum_exp - (target_logit if confidence == 1.0 else target_logit * confidence)
            if floor != 0.0:
                loss -= statistics[3] * floor
            loss.masked_fill_(target == ignore_index, 0.0)
        ctx.save_for_backward(logits, target, log_sum_exp, upstream, dlogits)
        ctx.words, ctx.in_place, ctx.triton = words, in_place, triton
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, log_sum_exp, upstream, dlogits = ctx.saved_tensors
        arguments = (logits, target, log_sum_exp, dloss)
        if dlogits.numel():
            torch.ops.trimegatron.cross_entropy_mend_(dlogits, *arguments, upstream, *ctx.words)
            written = dlogits
        elif ctx.in_place and logits.is_contiguous():
            _kernels(ctx.triton).cross_entropy_backward_(*arguments, *ctx.words)
            written = logits
        else:
            dlogits = _kernels(ctx.triton).cross_entropy_backward(*arguments, *ctx.words)
            return dlogits, None, None, None, None, None, None
        if not torch.compiler.is_compiling():  # whoever else saved this tensor, or runs this backward again, is told
            torch.autograd.graph.increment_version(written)
        return written, None, None, None, None, None, None
