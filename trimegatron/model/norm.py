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
    Where x goes on as the residual too, it comes back with the norm, and so does a sum that is made in the same pass:
    in backward the gradients of the two are added where the norm's is made.
    """

    def __init__(self, spec: GPTSpec):
        super().__init__()
        shape = (spec.hidden_size,)
        settings: dict[str, Any] = {"is_partial": spec.sequence_parallel, "dtype": spec.dtype, "device": spec.device}
        self.weight = make_parameter(shape, init_mean=1.0, **settings)
        self.bias = make_parameter(shape, **settings)
        self.settings: dict[str, Any] = {"eps": spec.layernorm_epsilon, "impl": spec.kernels}

    def forward(self, x: torch.Tensor) -> Remade:
        """The norm of x."""
        return self.with_residual(x)[1]

    def with_residual(self, x: torch.Tensor) -> tuple[torch.Tensor, Remade]:
        """x and its norm."""
        x, y = functional.layer_norm_with_residual(x, self.weight, self.bias, **self.settings)
        return x, self.remade(y, x)

    def of_sum(
        self, x: torch.Tensor, x_bias: torch.Tensor, residual: torch.Tensor, **dropout: Any
    ) -> tuple[torch.Tensor, Remade]:
        """residual + dropout(x + x_bias), whose arguments ``dropout`` are those of ``bias_dropout_add``, and its
        norm."""
        total, y = functional.bias_dropout_add_layer_norm(
            x, x_bias, residual, self.weight, self.bias, **self.settings, **dropout
        )
        return total, self.remade(y, total)

    def remade(self, y: torch.Tensor, x: torch.Tensor) -> Remade:
        """y, the norm of x, with its recipe."""
        return Remade.with_recipe(y, partial(functional.layer_norm, **self.settings), x, self.weight, self.bias)
