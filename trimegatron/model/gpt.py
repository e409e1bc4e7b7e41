"""GPT, cut into stages: embedding | layers | head with the loss inside.

Legend: s sequence, b micro-batch, h hidden, v this rank's columns of the padded vocabulary, t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from trimegatron.model.attention import DocumentMask
from trimegatron.model.embedding import GPTEmbedding
from trimegatron.model.layer import TransformerLayer
from trimegatron.model.norm import LayerNorm
from trimegatron.model.recompute import replay
from trimegatron.model.spec import GPTSpec
from trimegatron.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from trimegatron.tensor_parallel.linear import column_parallel_linear
from trimegatron.tensor_parallel.region import Region


class GPTStage(nn.Module):
    """The layers ``layers`` (global numbers), behind the embedding on the first stage, before the head on the last.

    A model that is not cut is one stage that is both. Parameter names carry global layer numbers, so they are the
    same however the model is cut. The head is tied to the word embedding.
    """

    def __init__(self, spec: GPTSpec, layers: range, *, is_first: bool = True, is_last: bool = True):
        super().__init__()
        self.is_first = is_first
        self.is_last = is_last
        if is_first or is_last:
            self.embedding = GPTEmbedding(spec, with_positions=is_first, is_tied=not (is_first and is_last))
        self.layers = nn.ModuleDict({str(layer): TransformerLayer(spec, layer) for layer in layers})
        if is_last:
            self.final_layernorm = LayerNorm(spec)
        self.region = Region(spec.tensor.group, spec.sequence_parallel)
        self.recompute = spec.recompute
        self.kernels = spec.kernels

    def forward(
        self,
        x: torch.Tensor,
        *,
        labels: torch.Tensor | None = None,
        loss_mask: torch.Tensor | None = None,
        sample_numbers: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [b, s], or the previous stage's [s, b, h] -> [s, b, h]; on the last stage the loss, or without
        labels the logits. With sequence parallelism stages exchange [s/t, b, h].

        Args:
            labels: [b, s], the token after each.
            loss_mask: [b, s], 1 where the loss counts.
            sample_numbers: [b] int64, which samples of the run these are; needed where there is dropout.
            position_ids: [b, s] int64, rows of the position table; 0 … s − 1 without them.
            document_starts: [b, s] int64, the first position each query may see; 0 without them. Every stage needs
                them. Dropout masks stay those of the position in the sample.

        Returns:
            On the last stage the sum of the losses of all unmasked tokens (fp32 scalar), or the logits [s, b, v].
        """
        if self.is_first:
            x = self.embedding(x, sample_numbers, position_ids)
        mask = None if document_starts is None else DocumentMask(document_starts)
        layers = list(self.layers.values())
        for run in self.recompute.runs(len(layers)):
            apply = partial(apply_layers, layers[run.start : run.stop])
            x = replay(apply, x, sample_numbers, mask) if run.is_replayed else apply(x, sample_numbers, mask)
        return self.head(x, labels, loss_mask) if self.is_last else x

    def head(self, x: torch.Tensor, labels: torch.Tensor | None, loss_mask: torch.Tensor | None) -> torch.Tensor:
        """Final norm, logits over the tied table, loss."""
        words = self.embedding.word_embeddings
        logits = column_parallel_linear(self.final_layernorm(x), words.weight, None, self.region)
        if labels is None:
            return logits
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.transpose(0, 1),
            vocab_start=words.vocab_start,
            num_valid=words.num_valid,
            group=self.region.group,
            in_place=True,
            kernels=self.kernels,
        )  # [s, b]
        if loss_mask is not None:
            loss = loss * loss_mask.transpose(0, 1)
        return loss.sum()


class GPTChunks(nn.ModuleList):
    """The stages of one pipeline rank, first to last: one, or several where they are interleaved.

    Parameters have their stage's names, which are global: no chunk's number is in them.
    """

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self:
            yield from stage.named_parameters(prefix, recurse, remove_duplicate)


def apply_layers(
    layers: list[nn.Module], x: torch.Tensor, sample_numbers: torch.Tensor | None, mask: DocumentMask | None
) -> torch.Tensor:
    """One layer after the other: [s, b, h] -> [s, b, h]."""
    for layer in layers:
        x = layer(x, sample_numbers, mask)
    return x
