"""The flat buffer: layout, gradients as views, accumulation in fp32, and the optimizer over it."""

from __future__ import annotations

import pytest
import torch

from trimegatron.data_parallel.buffer import ALIGNMENT, ParameterBuffer
from trimegatron.mesh import Mesh
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.gradients import clip_factor, squared_norm


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


def test_layout():
    model, buffer = build()
    assert {piece.name for piece in buffer.slices} == {name for name, _ in model.named_parameters()}
    for piece in buffer.slices:
        assert piece.start % ALIGNMENT == 0
        assert piece.view(buffer.params).data_ptr() == piece.parameter.data_ptr()
        assert (piece.parameter.dim() >= 2) == (piece.start < buffer.num_decayed)
        replicated = buffer.replicated.start <= piece.start < buffer.replicated.stop
        assert replicated != piece.spec.is_sharded
    total = sum(part.stop - part.start for part in (*buffer.sharded, buffer.replicated))
    assert total == buffer.params.numel() == buffer.grads.numel()


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
    buffer.zero_grad()
    backward(model)
    assert torch.equal(buffer.grads, once)


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
    norm = squared_norm(buffer, Mesh(torch.device("cpu")), kernels="auto").sqrt()
    expected = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None))  # type: ignore
    torch.testing.assert_close(norm, expected)
    assert clip_factor(torch.tensor(4.0), 1.0).item() == pytest.approx(1 / (4 + 1e-6))
    assert clip_factor(torch.tensor(0.5), 1.0).item() == 1.0
    assert clip_factor(torch.tensor(4.0), 0.0).item() == 1.0
    assert (
        buffer.count_zero_grads(Mesh(torch.device("cpu")))
        == sum((p.grad == 0).sum() for p in model.parameters()) - 3 * 24
    )  # padding


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
        buffer.zero_grad()
        backward(model)
        for piece, copy in zip(buffer.slices, copies, strict=True):
            copy.grad = piece.view(buffer.grads).clone() * 0.5
        optimizer.step(lr=0.01 / (step + 1), weight_decay=0.1, grad_multiplier=torch.tensor(0.5))
        for group in reference.param_groups:
            group["lr"] = 0.01 / (step + 1)
        reference.step()
    for piece, copy in zip(buffer.slices, copies, strict=True):
        torch.testing.assert_close(piece.view(optimizer.master), copy.detach(), atol=2e-6, rtol=1e-5)
        assert torch.equal(piece.parameter, piece.view(optimizer.master).to(dtype))
