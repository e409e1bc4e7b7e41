"""A GPT-2 as one would write it today in plain PyTorch, to be compiled: what a step of ours is measured against.

The way of Andrej Karpathy's nanoGPT: torch's fused attention, the head tied to the embedding, the loss on all logits.
Parameters have the names of GPT-2's checkpoints; matrices are ``nn.Linear``'s, [out, in].

Legend: b batch, s sequence, h hidden, n heads, d head size, v vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trimegatron.model.spec import GPTSpec


class Attention(nn.Module):
    """Causal self-attention: [b, s, h] -> [b, s, h]."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.c_attn = nn.Linear(spec.hidden_size, 3 * spec.hidden_size)
        self.c_proj = nn.Linear(spec.hidden_size, spec.hidden_size)
        self.num_heads, self.dropout = spec.num_attention_heads, spec.attention_dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1)
        )  # each [b, n, s, d]
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.c_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.c_fc = nn.Linear(spec.hidden_size, spec.ffn_hidden_size)
        self.c_proj = nn.Linear(spec.ffn_hidden_size, spec.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer: [b, s, h] -> [b, s, h]."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden_size, spec.layernorm_epsilon)
        self.attn = Attention(spec)
        self.ln_2 = nn.LayerNorm(spec.hidden_size, spec.layernorm_epsilon)
        self.mlp = MLP(spec)
        self.drop = nn.Dropout(spec.hidden_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class NanoGPT(nn.Module):
    """Tokens [b, s] -> logits [b, s, v]."""

    def __init__(self, spec: GPTSpec):
        super().__init__()
        self.wte = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.wpe = nn.Embedding(spec.max_position_embeddings, spec.hidden_size)
        self.drop = nn.Dropout(spec.hidden_dropout)
        self.h = nn.ModuleList([Block(spec) for _ in range(spec.num_layers)])
        self.ln_f = nn.LayerNorm(spec.hidden_size, spec.layernorm_epsilon)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)
