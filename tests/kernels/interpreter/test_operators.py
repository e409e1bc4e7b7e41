"""The operators as PyTorch sees them: opcheck, full-graph compilation, second derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trimegatron.kernels import functional

SAMPLES = torch.tensor([4, 9])


def arguments() -> dict[str, tuple[Any, ...]]:
    x, w, rows = torch.randn(3, 2, 8), torch.randn(8), torch.rand(6)
    scores, mask = torch.randn(2, 2, 3, 5), torch.rand(2, 1, 3, 5) > 0.5
    q, lse = torch.randn(2, 2, 3, 16), torch.full((2, 2, 3), 3.0)
    k, starts = torch.randn(3, 2, 1, 16).permute(1, 2, 0, 3), torch.tensor([[0, 0, 2], [0, 1, 1]])
    flat = [torch.rand(128) for _ in range(4)]
    tiles = functional.AdamWRuns([functional.Run(64, 64, 64, True)]).tiles(flat[0].device)
    words, ids = torch.randint(7, (3, 2)), (0, 7, -100, 0.8, 0.02)
    values = torch.tensor(functional.adamw_scalars(lr=0.1, weight_decay=0.1, beta1=0.9, beta2=0.99, eps=1e-8, step=1))
    return {
        "layer_norm_forward": (x, w, w, 1e-5),
        "layer_norm_backward": (x, x, w, rows, rows, False, x + 1),
        "bias_gelu_forward": (x, w, "tanh"),
        "bias_gelu_backward": (x, x, w, "none"),
        "bias_dropout_add_forward": (x, w, x, SAMPLES, 0.1, 1, 2, 3, 4),
        "bias_dropout_add_backward": (x, w, SAMPLES, torch.float16, 0.1, 1, 2, 3, 4),
        "column_sum": (x, torch.float16),
        "scaled_causal_softmax_forward": (scores.transpose(0, 1), 0.5),
        "scaled_masked_softmax_forward": (scores, mask, 0.5),
        "scaled_softmax_backward": (scores, scores, 0.5, True),
        "softmax_dropout_forward": (scores.transpose(0, 1), mask[:, :, :1], SAMPLES, 0.5, True, 0.1, 1, 2, 3, 4),
        "softmax_dropout_backward": (scores, scores, mask, torch.rand(2, 12) + 1, SAMPLES, 0.5, False, 0.1, 1, 2, 3, 4),
        "attention_dropout": (scores, SAMPLES, 0.1, 1, 2, 3, 4),
        "flash_attention_forward": (q, k, k, SAMPLES, starts, 0.3, 0.1, 1, 2, 3),
        "flash_attention_backward": (q, q, k, k, q, lse, SAMPLES, starts, 0.3, 0.1, 1, 2, 3),
        "adamw_step_": (*flat, values, tiles, flat[0].half()),
        "sum_of_squares": (x,),
        "bias_gelu_backward_with_activation": (x, x, w, "tanh"),
        "bias_dropout_add_layer_norm_forward": (x, w, x, w, w, SAMPLES, 1e-5, True, 0.1, 1, 2, 3, 4),
        "bias_dropout_add_layer_norm_backward": (
            x, x, x, w, rows, rows, w, SAMPLES, torch.float16, True, 0.1, 1, 2, 3, 4),
        "cross_entropy_statistics": (x, words, 0, 7, True),
        "cross_entropy_forward": (x, words, x[..., 0], 7, -100, 0.8, 0.02),
        "cross_entropy_backward": (x, words, x[..., 1], x[..., 2], *ids),
        "cross_entropy_backward_": (x.clone(), words, x[..., 1], x[..., 2], *ids),
        "cross_entropy_mend_": (x * 0, x, words, x[..., 1], x[..., 2], x[..., 3], *ids),
    }  # fmt: skip


def test_every_operator_is_listed() -> None:
    names = {str(schema.name).removeprefix("trimegatron::") for schema in torch._C._jit_get_all_schemas()
             if schema.name.startswith("trimegatron::")}  # fmt: skip
    assert names == set(arguments())


@pytest.mark.parametrize("name", list(arguments()))
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.trimegatron, name).default, arguments()[name])


def step(x: Tensor, w: Tensor, b: Tensor, scores: Tensor, samples: Tensor) -> Tensor:
    mask = {"p": 0.1, "seed": 1, "sample_numbers": samples, "layer": 2, "impl": "triton"}
    x, y = functional.layer_norm_with_residual(x, w, b, impl="triton")
    y = functional.bias_gelu(y, b, impl="triton")
    y = functional.bias_dropout_add(y, w, x, site=functional.Site.MLP_OUTPUT, **mask)
    z = functional.attention_dropout(functional.scaled_causal_softmax(scores, 0.5, impl="triton"), **mask)
    z = functional.softmax_dropout(z, None, 0.5, causal=True, **mask)
    z = functional.scaled_masked_softmax(z, scores.detach() > 1, 0.5, impl="triton")
    total, y = functional.bias_dropout_add_layer_norm(y, w * 2, x, w, b, site=functional.Site.ATTENTION_OUTPUT, **mask)
    total, y = functional.add_layer_norm(y, total, w, b, impl="triton")
    heads = y.view(3, 2, 2, 4).permute(1, 2, 0, 3)
    a = functional.flash_attention(
        heads, heads + 1, heads * 2, scale=0.5, document_starts=samples.new_zeros(2, 3), **mask
    )
    words, ones = samples.repeat(3, 1) % 8, torch.ones(3, 2)
    loss = functional.cross_entropy(y, words, label_smoothing=0.1, impl="triton")
    loss = loss + functional.cross_entropy(y * 2, words, upstream=ones, impl="triton")
    loss = loss + functional.cross_entropy(y * 3, words, in_place=True, impl="triton")
    return (y.square().sum() + z.square().sum() + a.square().sum()) * 0.5 + loss.sum()


def test_compiles_as_one_graph() -> None:
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(3)
        inputs = [torch.randn(3, 2, 8), torch.randn(8), torch.randn(8), torch.randn(2, 2, 3, 5)]
        inputs = [x.requires_grad_() for x in inputs]
        loss = function(*inputs, SAMPLES)
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in inputs)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


def test_recomputing_makes_the_same_masks() -> None:
    inputs = [torch.randn(3, 2, 8), torch.randn(8), torch.randn(8), torch.randn(2, 2, 3, 5)]
    grads = []
    for recompute in (False, True):
        leaves = [t.clone().requires_grad_() for t in inputs]
        if recompute:
            loss = checkpoint(step, *leaves, SAMPLES, use_reentrant=False, preserve_rng_state=False)
        else:
            loss = step(*leaves, SAMPLES)
        loss.backward()
        grads.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(2, 8, requires_grad=True)
    y = functional.layer_norm(x, torch.ones(8), torch.zeros(8), impl="triton")
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
