"""What a layer keeps for backward with the kernels: no mask and no square, or with the fused softmax two squares in its
dtype and two numbers a row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from trimegatron.bench.activations import RECOMPUTE, ActivationsConfig, kept_by_a_layer, layer_spec
from trimegatron.kernels import functional
from trimegatron.mesh import Axis
from trimegatron.model.gpt import GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.recompute import Recompute
from trimegatron.tensor_parallel.linear import column_parallel_linear
from trimegatron.tensor_parallel.region import Region
from trimegatron.tensor_parallel.remade import Remade

S, B, H, A = 16, 2, 32, 4


@pytest.mark.parametrize(
    ("dropout", "backend", "core"),
    [
        ((0.0, 0.0), "auto", 4 * A * S * B),
        ((0.1, 0.0), "auto", 4 * A * S * B),
        ((0.1, 0.1), "auto", 4 * A * S * B),
        ((0.1, 0.1), "softmax", 4 * A * S * S * B + 8 * A * S * B),
    ],
)
def test_bytes(dropout: tuple[float, float], backend: str, core: int) -> None:
    config = ActivationsConfig(hidden_size=H, num_attention_heads=A, seq_length=S, micro_batch_size=B, kernels="triton")
    spec = layer_spec(config, Axis(), False, dropout, RECOMPUTE["nothing"])
    spec = replace(spec, attention_backend=backend)
    norms = 2 * 2 * 4 * S * B
    assert sum(tensor.num_bytes for tensor in kept_by_a_layer(spec, S, B)) == 20 * S * B * H + norms + core


def test_recomputing_layers_changes_no_bit() -> None:
    """Whatever runs the layers are cut into, the same passes are one."""
    config = ActivationsConfig(hidden_size=H, num_attention_heads=A, seq_length=S, micro_batch_size=B, kernels="triton")
    x, found = torch.randn(4, B, H, dtype=torch.bfloat16), []
    for recompute in (Recompute(), Recompute("full", "uniform", 2), Recompute("full", "block", 1)):
        spec = layer_spec(config, Axis(), False, (0.1, 0.0), recompute)
        stage = GPTStage(spec, range(2), is_first=False, is_last=False)
        initialize(stage, spec.seed)
        leaf = x.clone().requires_grad_()
        stage(leaf, sample_numbers=torch.arange(B)).float().square().sum().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in stage.parameters())])
    for gradients in zip(*found, strict=True):
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_remade_inputs_change_no_bit(dtype: torch.dtype) -> None:
    """A product of a norm's output, then one of a GELU's: kept or remade, the same gradients."""
    norm, gelu = (partial(function, impl="triton") for function in (functional.layer_norm, functional.bias_gelu))
    tensors = [torch.randn(shape).to(dtype) for shape in [(5, 3, 24), (24,), (24,), (40, 24), (40,), (24, 40)]]
    gradients = []
    for is_remade in (False, True):
        x, scale, shift, w1, bias, w2 = leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        normed = Remade.by(norm, x, scale, shift)
        y = column_parallel_linear(normed if is_remade else normed.value, w1, None, Region())
        active = Remade.by(gelu, y, bias)
        y = column_parallel_linear(active if is_remade else active.value, w2, None, Region())
        y.backward(torch.ones_like(y))
        gradients.append([leaf.grad for leaf in leaves])
    for kept, remade in zip(*gradients, strict=True):
        assert kept is not None and torch.equal(kept, remade) and kept.abs().sum() > 0
