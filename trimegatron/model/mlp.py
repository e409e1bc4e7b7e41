"""The feed-forward half of a layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from trimegatron.kernels import functional
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from trimegatron.tensor_parallel.remade import Remade


class MLP(nn.Module):
    """GELU(x W₁ᵀ + b₁) W₂ᵀ: [s, b, h] -> [s, b, h]. b₂ is ``output_bias``: the caller adds it, fused with dropout
    and residual. The GELU's output is made again in backward, from x W₁ᵀ.
    """

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(
            spec.hidden_size,
            spec.ffn_hidden_size,
            axis=spec.tensor,
            init_std=spec.init_method_std,
            add_bias=False,
            sequence_parallel=spec.sequence_parallel,
            dtype=spec.dtype,
            device=spec.device,
        )
        self.dense_4h_to_h = RowParallelLinear(
            spec.ffn_hidden_size,
            spec.hidden_size,
            axis=spec.tensor,
            init_std=spec.output_init_std,
            sequence_parallel=spec.sequence_parallel,
            dtype=spec.dtype,
            device=spec.device,
        )
        self.gelu = partial(functional.bias_gelu, approximate=spec.gelu, impl=spec.kernels)

    @property
    def output_bias(self) -> nn.Parameter:
        return self.dense_4h_to_h.bias

    def forward(self, x: torch.Tensor | Remade) -> torch.Tensor:
        y = self.dense_h_to_4h(x)  # [s, b, f/t]
        return self.dense_4h_to_h(Remade.by(self.gelu, y, self.dense_h_to_4h.bias))
