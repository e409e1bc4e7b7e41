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
    "layer_norm_forward(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    "layer_norm",
    lambda x, weight, bias, eps: (
        _like(x),
        x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32),
        x.new_empty(x.numel() // max(1, x.shape[-1]), dtype=torch.float32),
    ),
)
define_op(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    "layer_norm",
    lambda dy, x, weight, mean, rstd: (_like(x), _like(weight), _like(weight)),
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
    " int num_decayed, Tensor(d!)? low_precision) -> ()",
    "adamw",
    lambda *args: None,
)
define_op(
    "sum_of_squares(Tensor grad) -> Tensor",
    "adamw",
    lambda grad: grad.new_empty((), dtype=torch.float32),
)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        y, mean, rstd = torch.ops.trimegatron.layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = torch.ops.trimegatron.layer_norm_backward(dy, *ctx.saved_tensors)
        return dx, dweight, dbias, None


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return torch.ops.trimegatron.bias_gelu_forward(x, bias, approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dbias = torch.ops.trimegatron.bias_gelu_backward(dy, *ctx.saved_tensors, ctx.approximate)
        return dx, dbias, None


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
    def forward(ctx: Any, scores: Tensor, scale: float) -> Tensor:
        y = torch.ops.trimegatron.scaled_causal_softmax_forward(scores, scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.trimegatron.scaled_softmax_backward(dy, *ctx.saved_tensors, ctx.scale, True), None


class ScaledMaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        y = torch.ops.trimegatron.scaled_masked_softmax_forward(scores, mask, scale)
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return torch.ops.trimegatron.scaled_softmax_backward(dy, *ctx.saved_tensors, ctx.scale, False), None, None


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
