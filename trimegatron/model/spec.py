"""What every part of the model needs to know about the whole of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trimegatron.mesh import Axis
from trimegatron.model.recompute import Recompute


@dataclass(frozen=True)
class GPTSpec:
    """The model as it is built on one rank: the architecture, the numerics, and this rank's place. Sizes are global
    ones.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    kv_channels: int
    """Width of one attention head."""
    max_position_embeddings: int
    vocab_size: int
    """Words that exist; only they take probability."""
    padded_vocab_size: int
    """Rows of the embedding table: a multiple of what the tensor-parallel cut needs."""
    layernorm_epsilon: float = 1e-5
    attention_dropout: float = 0.1
    hidden_dropout: float = 0.1
    init_method_std: float = 0.02
    gelu: str = "tanh"
    """Form of the activation: "tanh", or "none" for the exact one (torch's ``approximate``)."""
    attention_backend: str = "auto"
    apply_query_key_layer_scaling: bool = False
    kernels: str = "auto"
    """Implementation of the fused operations: "auto" is Triton on a GPU and the eager references on a CPU."""
    seed: int = 1234
    """Of initial weights and dropout masks, both functions of it and of where they are (docs/architecture.md)."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tensor: Axis = field(default_factory=Axis)
    sequence_parallel: bool = False
    """Between tensor-parallel regions a rank holds its own piece of the sequence; only where ``tensor`` is cut."""
    recompute: Recompute = field(default_factory=Recompute)

    @property
    def sequence_rank(self) -> int:
        """Which piece of the sequence this rank holds between tensor-parallel regions; 0 where it is not cut."""
        return self.tensor.rank if self.sequence_parallel else 0

    def activation(self, seq_length: int, micro_batch_size: int) -> torch.Tensor:
        """What one pipeline stage sends the next, without storage: [s, b, h], or this rank's piece of the sequence."""
        if self.sequence_parallel:
            seq_length //= self.tensor.size
        return torch.empty(seq_length, micro_batch_size, self.hidden_size, dtype=self.dtype, device="meta")

    @property
    def num_parameters(self) -> int:
        """Of the whole model, without padding: weights and biases of the layers, their norms, the two tables."""
        h, f, p = self.hidden_size, self.ffn_hidden_size, self.num_attention_heads * self.kv_channels
        layer = (3 * p * h + 3 * p) + (p * h + h) + (f * h + f) + (f * h + h) + 4 * h
        return self.num_layers * layer + 2 * h + (self.vocab_size + self.max_position_embeddings) * h

    @property
    def output_init_std(self) -> float:
        """Standard deviation of the layers that write to the residual stream: σ / √(2 · layers)."""
        return self.init_method_std / (2.0 * self.num_layers) ** 0.5
