"""Layer norm as a module."""

from __future__ import annotations

import torch
from torch import nn

from trimegatron.kernels import functional
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.parameter import make_parameter


class LayerNorm(nn.Module):
    """y = (x − mean) / √(variance + ε) · weight + bias over the last dimension, statistics in fp32: [s, b, h] ->
    [s, b, h].
    """

    def __init__(self, spec: GPTSpec):
        super().__init__()
        shape = (spec.hidden_size,)
        self.weight = make_parameter(shape, init_mean=1.0, dtype=spec.dtype, device=spec.device)
        self.bias = make_parameter(shape, dtype=spec.dtype, device=spec.device)
        self.epsilon = spec.layernorm_epsilon
        self.kernels = spec.kernels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight, self.bias, self.epsilon, impl=self.kernels)
