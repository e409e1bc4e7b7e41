"""Layer norm as a module."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from trimegatron.kernels import functional
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.parameter import make_parameter
from trimegatron.tensor_parallel.remade import Remade


class LayerNorm(nn.Module):
    """y = (x − mean) / √(variance + ε) · weight + bias over the last dimension, statistics in fp32: [s, b, h] ->
    [s, b, h].

    Every norm here feeds a matrix product, so the result comes with its recipe: the product's backward makes it again.
    """

    def __init__(self, spec: GPTSpec):
        super().__init__()
        shape = (spec.hidden_size,)
        settings: dict[str, Any] = {"is_partial": spec.sequence_parallel, "dtype": spec.dtype, "device": spec.device}
        self.weight = make_parameter(shape, init_mean=1.0, **settings)
        self.bias = make_parameter(shape, **settings)
        self.function = partial(functional.layer_norm, eps=spec.layernorm_epsilon, impl=spec.kernels)

    def forward(self, x: torch.Tensor) -> Remade:
        return Remade.by(self.function, x, self.weight, self.bias)
