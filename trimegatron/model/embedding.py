"""Words plus learned positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trimegatron.kernels import functional
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.embedding import VocabParallelEmbedding
from trimegatron.tensor_parallel.parameter import make_parameter


class PositionEmbedding(nn.Module):
    """The table of learned positions, the same on every rank: ``weight`` is [max positions, h]."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        shape = (spec.max_position_embeddings, spec.hidden_size)
        self.weight = make_parameter(
            shape,
            init_std=spec.init_method_std,
            is_partial=spec.sequence_parallel,
            dtype=spec.dtype,
            device=spec.device,
        )


class GPTEmbedding(nn.Module):
    """dropout(word[token] + position[0 … s−1, or position_ids]): tokens [b, s] -> [s, b, h], or this rank's piece.

    ``is_tied``: another pipeline stage holds the word table too. The copy, for the head of the last stage, is one
    without positions.
    """

    def __init__(self, spec: GPTSpec, *, with_positions: bool = True, is_tied: bool = False):
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            spec.vocab_size,
            spec.padded_vocab_size,
            spec.hidden_size,
            axis=spec.tensor,
            init_std=spec.init_method_std,
            is_tied=is_tied,
            is_tied_copy=not with_positions,
            sequence_parallel=spec.sequence_parallel,
            dtype=spec.dtype,
            device=spec.device,
        )
        if with_positions:
            self.position_embeddings = PositionEmbedding(spec)
        self.sequence_rank = spec.sequence_rank
        self.dropout = spec.hidden_dropout
        self.seed = spec.seed
        self.kernels = spec.kernels

    def forward(
        self, tokens: torch.Tensor, sample_numbers: torch.Tensor | None, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        words = self.word_embeddings(tokens.t())  # [s, b, h], or this rank's piece
        start = self.sequence_rank * words.shape[0]
        here = slice(start, start + words.shape[0])
        table = self.position_embeddings.weight
        if position_ids is None:
            positions = table[here].unsqueeze(1)  # [s, 1, h]
        else:
            positions = F.embedding(position_ids.t()[here], table)  # [s, b, h]
        return functional.bias_dropout_add(
            words + positions,
            None,
            None,
            p=self.dropout,
            seed=self.seed,
            sample_numbers=sample_numbers,
            site=functional.Site.EMBEDDING,
            layer=0,
            position_offset=start,
            training=self.training,
            impl=self.kernels,
        )
