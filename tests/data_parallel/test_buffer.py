"""The flat buffer: layout, gradients as views, accumulation in fp32, and the optimizer over it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.gradients import clip_factor, squared_norms


def build(
    dtype: torch.dtype = torch.float32, grad_dtype: torch.dtype = torch.float32
) -> tuple[GPTStage, ParameterBuffer]:
    spec = GPTSpec(1, 24, 96, 3, 8, 8, 29, 32, attention_dropout=0.0, hidden_dropout=0.0, dtype=dtype)
    model = GPTStage(spec, range(1))
    initialize(model, 1)
    return model, ParameterBuffer(model.named_parameters(), grad_dtype=grad_dtype)


TOKENS = torch.arange(16).view(2, 8)


def backward(model: GPTStage) -> None:
    (model(TOKENS, labels=TOKENS) / 16).backward()


def test_parameters_are_views():
    model, buffer = build()
    assert {piece.name for piece in buffer.slices} == {name for name, _ in model.named_parameters()}
    for piece in buffer.slices:
        assert piece.view(buffer.params).data_ptr() == piece.parameter.data_ptr()
    assert sum(part.numel() for part, _ in buffer.counted_grads()) == buffer.params.numel() == buffer.grads.numel()
    decayed = sum(part.numel() for part, decays in buffer.counted_grads() if decays)
    assert decayed >= sum(p.numel() for p in model.parameters() if p.dim() >= 2)


def test_gradients_accumulate_in_place():
    model, buffer = build()
    backward(model)
    once = buffer.grads.clone()
    assert once.abs().sum() > 0
    backward(model)
    torch.testing.assert_close(buffer.grads, 2 * once)
    for piece in buffer.slices:
        assert piece.parameter.grad is not None
        assert piece.parameter.grad.data_ptr() == piece.view(buffer.grads).data_ptr()
    buffer.start(num_micro_batches=1)
    backward(model)
    buffer.finish()
    assert torch.equal(buffer.grads, once)


def test_a_gradient_too_few_or_too_many_is_found():
    model, buffer = build()
    buffer.start(num_micro_batches=2)
    backward(model)
    with pytest.raises(AssertionError, match="gradients are missing"):
        buffer.finish()
    buffer.start(num_micro_batches=1)
    backward(model)
    buffer.slices[0].parameter.sum().backward()
    with pytest.raises(AssertionError, match="or too many"):
        buffer.finish()


def test_half_precision_gradients_accumulate_in_fp32():
    """1000 times the same bf16 gradient: a bf16 sum would stop growing."""
    _, buffer = build(torch.bfloat16, torch.float32)
    piece = buffer.slices[0]
    for _ in range(1000):
        (piece.parameter * 1.0).sum().backward()
        assert piece.parameter.grad is None
    assert torch.all(piece.view(buffer.grads) == 1000.0)


def test_norm_and_clip_factor():
    model, buffer = build()
    backward(model)
    decayed, others = squared_norms(buffer.counted_grads(), device=torch.device("cpu"), kernels="auto")
    for total, dims in ((decayed, {2}), (others, {1})):
        grads = [p.grad for p in model.parameters() if p.grad is not None and p.dim() in dims]
        torch.testing.assert_close(total, torch.stack([grad.square().sum() for grad in grads]).sum())
    assert clip_factor(torch.tensor(4.0), 1.0).item() == pytest.approx(1 / (4 + 1e-6))
    assert clip_factor(torch.tensor(0.5), 1.0).item() == 1.0
    assert clip_factor(torch.tensor(4.0), 0.0).item() == 1.0
    assert buffer.count_zero_grads() == sum((p.grad == 0).sum() for p in model.parameters()) - 3 * 24  # padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_equals_torchs(dtype: torch.dtype):
    """Ten steps beside torch.optim.AdamW on fp32 copies: decay on matrices only, the model gets the rounded weights."""
    model, buffer = build(dtype)
    copies = [torch.nn.Parameter(piece.parameter.detach().float().clone()) for piece in buffer.slices]
    groups = [
        {"params": [c for c in copies if c.dim() >= 2], "weight_decay": 0.1},
        {"params": [c for c in copies if c.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.98), eps=1e-8)
    optimizer = FlatAdamW(buffer, beta1=0.9, beta2=0.98, epsilon=1e-8, kernels="auto")
    for step in range(10):
        buffer.start(num_micro_batches=1)
        backward(model)
        buffer.finish()
        for piece, copy in zip(buffer.slices, copies, strict=True):
            copy.grad = piece.view(buffer.grads).clone() * 0.5
        optimizer.step(lr=0.01 / (step + 1), weight_decay=0.1, grad_multiplier=torch.tensor(0.5))
        for group in reference.param_groups:
            group["lr"] = 0.01 / (step + 1)
        reference.step()
    for piece, copy in zip(buffer.slices, copies, strict=True):
        torch.testing.assert_close(piece.view(optimizer.master), copy.detach(), atol=2e-6, rtol=1e-5)
        assert torch.equal(piece.parameter, piece.view(optimizer.master).to(dtype))


def test_a_buffer_goes_with_its_model():
    """Nothing that autograd holds keeps it, nor the process groups in it, which others wait on after a failure."""
    model, buffer = build()
    watched = weakref.ref(buffer)
    del model, buffer
    gc.collect()
    assert watched() is None
