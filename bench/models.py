"""The model that benchmarks build, and the update that they make as the trainer does."""

from __future__ import annotations

from typing import Any

from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.model.spec import GPTSpec
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.gradients import clip_factor, squared_norms

LR, WEIGHT_DECAY, CLIP, BETAS, EPSILON = 1e-4, 0.1, 1.0, (0.9, 0.999), 1e-8
"""With a larger rate the first steps, without warm-up, blow up what bf16 rounds differently."""


def gpt2_spec(
    *, num_layers: int, hidden_size: int, num_attention_heads: int, seq_length: int, vocab_size: int, **rest: Any
) -> GPTSpec:
    """GPT-2's proportions: heads fill the width, the MLP is four times as wide, and nothing is padded."""
    return GPTSpec(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=4 * hidden_size,
        num_attention_heads=num_attention_heads,
        kv_channels=hidden_size // num_attention_heads,
        max_position_embeddings=seq_length,
        vocab_size=vocab_size,
        padded_vocab_size=vocab_size,
        **rest,
    )


def adamw(buffer: ParameterBuffer, *, kernels: str) -> FlatAdamW:
    """The optimizer over ``buffer``."""
    return FlatAdamW(buffer, beta1=BETAS[0], beta2=BETAS[1], epsilon=EPSILON, kernels=kernels)


def update(optimizer: FlatAdamW) -> None:
    """What follows the backward passes of a step: sums, norm, clip factor, AdamW."""
    buffer = optimizer.buffer
    buffer.finish()
    squares = squared_norms(buffer.counted_grads(), device=buffer.grads.device, kernels=optimizer.kernels)
    norm = (squares[0] + squares[1]).sqrt()
    optimizer.step(lr=LR, weight_decay=WEIGHT_DECAY, grad_multiplier=clip_factor(norm, CLIP))
