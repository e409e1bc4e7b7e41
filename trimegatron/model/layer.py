"""One transformer layer, pre-norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trimegatron.kernels import functional
from trimegatron.model.attention import DocumentMask, SelfAttention
from trimegatron.model.mlp import MLP
from trimegatron.model.norm import LayerNorm
from trimegatron.model.spec import GPTSpec


class TransformerLayer(nn.Module):
    """x += dropout(attention(norm(x)) + b); x += dropout(mlp(norm(x)) + b): [s, b, h] -> [s, b, h], or with
    sequence parallelism this rank's piece of either.

    ``layer`` is the global layer number, from 0: it names the parameters and it is part of the dropout masks' key.
    """

    def __init__(self, spec: GPTSpec, layer: int):
        super().__init__()
        self.input_layernorm = LayerNorm(spec)
        self.self_attention = SelfAttention(spec, layer)
        self.post_attention_layernorm = LayerNorm(spec)
        self.mlp = MLP(spec)
        self.layer = layer
        self.sequence_rank = spec.sequence_rank
        self.dropout = spec.hidden_dropout
        self.seed = spec.seed
        self.kernels = spec.kernels

    def forward(
        self, x: torch.Tensor, sample_numbers: torch.Tensor | None, mask: DocumentMask | None = None
    ) -> torch.Tensor:
        # As many passes are one as do not cross the border between layers: then what one pass rounds does not depend
        # on where the layers are cut for recomputation or the pipeline.
        dropout: dict[str, Any] = {
            "p": self.dropout,
            "seed": self.seed,
            "sample_numbers": sample_numbers,
            "layer": self.layer,
            "position_offset": self.sequence_rank * x.shape[0],
            "training": self.training,
        }
        x, normed = self.input_layernorm.with_residual(x)
        y = self.self_attention(normed, sample_numbers, mask)
        x, normed = self.post_attention_layernorm.of_sum(
            y, self.self_attention.output_bias, x, site=functional.Site.ATTENTION_OUTPUT, **dropout
        )
        y = self.mlp(normed)
        return functional.bias_dropout_add(
            y, self.mlp.output_bias, x, site=functional.Site.MLP_OUTPUT, impl=self.kernels, **dropout
        )
