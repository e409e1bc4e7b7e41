"""The word embedding, cut by vocabulary rows over the tensor-parallel group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trimegatron.mesh import Axis
from trimegatron.tensor_parallel.parameter import make_parameter, spec_of
from trimegatron.tensor_parallel.region import LeaveRegion, Region


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """The smallest multiple of ``divisible_by`` × ``tensor_parallel_size`` that holds the vocabulary."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


class VocabParallelEmbedding(nn.Module):
    """Rows of the embedding table by token: [s, b] -> [s, b, h], with sequence parallelism [s/t, b, h].

    A rank looks up the tokens it holds, puts zero for the others, and the sum over ranks is the embedding.
    ``weight`` is [padded vocabulary / t, h]; the padding is zero and stays zero.
    """

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        axis: Axis,
        init_std: float,
        is_tied: bool = False,
        is_tied_copy: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ):
        super().__init__()
        self.weight = make_parameter(
            (vocab_size, hidden_size),
            shard_dim=0,
            axis=axis,
            padded_size=padded_vocab_size,
            init_std=init_std,
            is_tied=is_tied,
            is_tied_copy=is_tied_copy,
            dtype=dtype,
            device=device,
        )
        self.region = Region(axis.group, sequence_parallel)
        self.vocab_start = axis.rank * self.weight.shape[0]
        self.num_valid = spec_of(self.weight).extent[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.region.group is None:
            return F.embedding(tokens, self.weight)
        local = tokens - self.vocab_start
        is_elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)
        return LeaveRegion.apply(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), self.region)
