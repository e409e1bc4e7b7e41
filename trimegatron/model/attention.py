"""Causal self-attention over the heads of this rank.

Legend: s sequence, b micro-batch, h hidden, n heads on this rank, d head size, t tensor-parallel size.
"""

from __future__ import annotations

import math
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimegatron.kernels import functional
from trimegatron.model.recompute import replay
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from trimegatron.tensor_parallel.remade import Remade

MASKED_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN: with an explicit mask its backward gave NaN on H100 and H200 (PyTorch issue 196678). The first takes
masks on a CPU only."""


class DocumentMask:
    """Causal attention that does not look before the start of the query's own document: query i sees the keys
    document_starts[i] … i.

    One object serves all layers, so that a form is made once and kept once for backward.

    Args:
        document_starts: int64 [b, s].
    """

    def __init__(self, document_starts: torch.Tensor):
        self.document_starts = document_starts
        self._bias: torch.Tensor | None = None

    @cached_property
    def hidden(self) -> torch.Tensor:
        """bool [b, 1, s, s], True where the query does not see the key."""
        position = torch.arange(self.document_starts.shape[1], device=self.document_starts.device)
        return ((position > position[:, None]) | (position < self.document_starts[:, :, None])).unsqueeze(1)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """0 and −∞ [b, 1, s, s], to add to the scores: what torch's attention would make of a bool mask, anew in every
        layer."""
        if self._bias is None or self._bias.dtype != dtype:
            zeros = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
            self._bias = zeros.masked_fill_(self.hidden, -math.inf)
        return self._bias


class SelfAttention(nn.Module):
    """softmax(causal(q kᵀ / √d)) v for each head, then the output projection: [s, b, h] -> [s, b, h].

    The rows of ``query_key_value`` are [head, (q, k, v), d] as Megatron's, so that a tensor-parallel cut is a
    rectangle. The output's bias is ``output_bias``: the caller adds it, fused with dropout and residual.
    """

    def __init__(self, spec: GPTSpec, layer: int):
        super().__init__()
        projection_size = spec.num_attention_heads * spec.kv_channels
        self.query_key_value = ColumnParallelLinear(
            spec.hidden_size,
            3 * projection_size,
            axis=spec.tensor,
            init_std=spec.init_method_std,
            add_bias=True,
            sequence_parallel=spec.sequence_parallel,
            dtype=spec.dtype,
            device=spec.device,
        )
        self.dense = RowParallelLinear(
            projection_size,
            spec.hidden_size,
            axis=spec.tensor,
            init_std=spec.output_init_std,
            sequence_parallel=spec.sequence_parallel,
            dtype=spec.dtype,
            device=spec.device,
        )
        self.num_heads = spec.num_attention_heads // spec.tensor.size
        self.head_size = spec.kv_channels
        self.core = AttentionCore(spec, layer)
        self.replays_core = spec.recompute.replays_core

    @property
    def output_bias(self) -> nn.Parameter:
        return self.dense.bias

    def forward(
        self, x: torch.Tensor | Remade, sample_numbers: torch.Tensor | None, mask: DocumentMask | None = None
    ) -> torch.Tensor:
        qkv = self.query_key_value(x).unflatten(-1, (self.num_heads, 3, self.head_size))
        q, k, v = (part.permute(1, 2, 0, 3) for part in qkv.unbind(dim=3))  # each [b, n, s, d]
        core = partial(replay, self.core) if self.replays_core else self.core
        context = core(q, k, v, sample_numbers, mask)  # [b, n, s, d]
        return self.dense(context.permute(2, 0, 1, 3).flatten(-2))


class AttentionCore(nn.Module):
    """Scores, softmax, dropout and the weighted sum; it has no parameters: q, k, v [b, n, s, d] -> [b, n, s, d].

    Backends: "sdpa" is torch's scaled_dot_product_attention, which cannot take our dropout masks; "softmax" is the
    fused-softmax path; "flash" is our kernel without a matrix of scores. "auto" takes sdpa where there is no dropout to
    apply; where there is, flash if Triton's kernels run and the head fits it, else softmax.
    """

    def __init__(self, spec: GPTSpec, layer: int):
        super().__init__()
        self.backend = spec.attention_backend
        self.dropout = spec.attention_dropout
        self.layer = layer
        self.head_offset = spec.tensor.rank * (spec.num_attention_heads // spec.tensor.size)
        self.scale = 1.0 / math.sqrt(spec.kv_channels)
        # Query-key layer scaling divides the scores by the layer's number before they are rounded to half precision
        # and multiplies them back in the fp32 softmax. In fp32 it would change nothing but rounding, so there it is
        # left out.
        scales_scores = spec.apply_query_key_layer_scaling and spec.dtype != torch.float32
        self.score_divisor = float(layer + 1) if scales_scores else 1.0
        self.seed = spec.seed
        self.kernels = spec.kernels

    def backend_for(self, q: torch.Tensor, drops: bool) -> str:
        """What "auto" comes to."""
        if self.backend != "auto":
            return self.backend
        if not drops:
            return "sdpa"
        fits = q.shape[-1] <= functional.MAX_HEAD_SIZE
        return "flash" if fits and functional.uses_triton(self.kernels, q) else "softmax"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sample_numbers: torch.Tensor | None,
        mask: DocumentMask | None = None,
    ) -> torch.Tensor:
        drops = self.training and self.dropout > 0.0
        backend = self.backend_for(q, drops)
        if backend == "flash":  # its scores are never rounded, so there is nothing to divide them for
            return functional.flash_attention(
                q,
                k,
                v,
                scale=self.scale,
                p=self.dropout,
                seed=self.seed,
                sample_numbers=sample_numbers,
                layer=self.layer,
                head_offset=self.head_offset,
                document_starts=None if mask is None else mask.document_starts,
                training=self.training,
                impl=self.kernels,
            )
        if backend == "sdpa":
            assert not drops, "refused when the configuration is built"
            if mask is None:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            with sdpa_kernel(MASKED_SDPA):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bias(q.dtype), scale=self.scale)
        # As [b n, s, d] views, which products take as they are: nothing of q, k and v is copied, nor kept beside them.
        heads = q.shape[:2]
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))
        scores = torch.baddbmm(
            q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=self.scale / self.score_divisor
        ).unflatten(0, heads)  # [b, n, s, s]
        probabilities = functional.softmax_dropout(
            scores,
            None if mask is None else mask.hidden,
            self.score_divisor,
            causal=mask is None,
            p=self.dropout,
            seed=self.seed,
            sample_numbers=sample_numbers,
            layer=self.layer,
            head_offset=self.head_offset,
            training=self.training,
            impl=self.kernels,
        )
        return torch.bmm(probabilities.flatten(0, 1), v).unflatten(0, heads)
