"""The attention kernels as cases; see ``kernel_cases.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimegatron.bench.case import LAYER, MASK, SEED, Case, P, Shapes, gradients
from trimegatron.kernels import functional, reference


def softmax_cases(s: Shapes) -> Iterator[Case]:
    """Causal but for the masked one; the last dimension is the keys, and so many queries as there are rows."""
    from trimegatron.kernels import attention_dropout, softmax

    queries = min(s.rows, s.hidden)
    shape = (1, s.rows // queries, queries, s.hidden)
    elements, scale = shape[1] * queries * s.hidden, 0.5
    label = f"{shape[1]}×{queries}×{s.hidden} {str(s.dtype).removeprefix('torch.')}"
    words = (scale, True, P, SEED, LAYER, 0, 0)

    def scores() -> Tensor:
        return s.normal(*shape, scale=4.0)

    def later(x: Tensor) -> Tensor:
        return torch.ones(queries, s.hidden, dtype=torch.bool, device=x.device).triu(s.hidden - queries + 1)

    def rival(x: Tensor, *_: Tensor) -> Tensor:
        return (x * scale).masked_fill(later(x), -torch.inf).softmax(dim=-1)

    def exact_dropout(x: Tensor, samples: Tensor, *_: Tensor) -> Tensor:
        return functional.softmax_dropout(x, None, scale, causal=True, sample_numbers=samples, impl="reference", **MASK)

    def with_statistics() -> list[Tensor]:
        x = scores()
        value = (x.float() * scale).masked_fill(
            torch.ones_like(x, dtype=torch.bool).triu(s.hidden - queries + 1), -1e30
        )
        top = value.amax(dim=-1)
        total = (value - top.unsqueeze(-1)).exp().sum(dim=-1)
        return [x, s.samples(1), torch.stack([top.flatten(), total.flatten()]), s.normal(*shape)]

    def dropout_backward(x: Tensor, samples: Tensor, statistics: Tensor, dy: Tensor) -> Tensor:
        return softmax.softmax_dropout_backward(dy, x, None, statistics, samples, *words)

    yield Case("causal_softmax_forward", label, lambda: [scores()],
               lambda x: softmax.scaled_causal_softmax_forward(x, scale),
               lambda x: reference.scaled_causal_softmax_forward(x, scale), rival,
               int(1.5 * elements * s.size))  # fmt: skip
    yield Case("causal_softmax_backward", label,
               lambda: [scores(), rival(scores()), s.normal(*shape)],
               lambda x, y, dy: softmax.scaled_softmax_backward(dy, y, scale, True),
               lambda x, y, dy: (scale * y.float() * (dy.float() - (y.float() * dy.float()).sum(-1, True))).to(x.dtype),
               rival, 2 * elements * s.size, leaves=1)  # fmt: skip
    yield Case("softmax_dropout_forward", label, lambda: [scores(), s.samples(1)],
               lambda x, samples: softmax.softmax_dropout_forward(x, None, samples, *words)[0], exact_dropout,
               lambda x, _: F.dropout(rival(x), P), int(1.5 * elements * s.size))  # fmt: skip
    yield Case("softmax_dropout_backward", label, with_statistics, dropout_backward, gradients(exact_dropout, 1),
               lambda x, *_: F.dropout(rival(x), P), 2 * elements * s.size, leaves=1)  # fmt: skip
    yield Case("masked_softmax_forward", label, lambda: [scores(), (s.normal(1, 1, *shape[2:]) > 0)],
               lambda x, mask: softmax.scaled_masked_softmax_forward(x, mask, scale),
               lambda x, mask: reference.scaled_masked_softmax_forward(x, mask, scale),
               lambda x, mask: (x * scale).masked_fill(mask, -torch.inf).softmax(dim=-1),
               2 * elements * s.size + elements // shape[1])  # fmt: skip
    yield Case("attention_dropout", label, lambda: [scores(), s.samples(1)],
               lambda x, samples: attention_dropout.attention_dropout(x, samples, *words[2:]),
               lambda x, samples: reference.attention_dropout(x, sample_numbers=samples, **MASK),
               lambda x, _: F.dropout(x, P), 2 * elements * s.size)  # fmt: skip


def flash_cases(s: Shapes, head_size: int | None = None) -> Iterator[Case]:
    """Causal with dropout: one sample of up to 2048 tokens, up to 16 heads of 64 or 128 unless given, so that the exact
    result fits into memory."""
    from trimegatron.kernels import flash_attention, flash_attention_backward

    size = head_size or min(s.hidden, 64 if s.hidden <= 1024 else 128)
    shape = (1, max(1, min(16, s.hidden // size)), min(s.rows, 2048), size)
    scale = size**-0.5
    label = "×".join(map(str, shape[1:])) + f" {str(s.dtype).removeprefix('torch.')}"
    floor = shape[1] * shape[2] * size * s.size
    words = (None, scale, P, SEED, LAYER, 0)  # no documents

    def inputs() -> list[Tensor]:
        return [*(s.normal(*shape) for _ in range(3)), s.samples(1)]

    def exact(q: Tensor, k: Tensor, v: Tensor, samples: Tensor, *_: Tensor) -> Tensor:
        return functional.flash_attention(q, k, v, scale=scale, sample_numbers=samples, impl="reference", **MASK)

    def rival(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=P, scale=scale)

    def backward_inputs() -> list[Tensor]:
        q, k, v, samples = inputs()
        later = torch.ones(shape[2], shape[2], dtype=torch.bool, device=s.device).triu(1)
        lse = (q.float() @ k.float().mT * scale).masked_fill(later, -torch.inf).logsumexp(dim=-1)
        return [q, k, v, samples, exact(q, k, v, samples), lse, s.normal(*shape)]

    def backward(q: Tensor, k: Tensor, v: Tensor, samples: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Any:
        return flash_attention_backward.flash_attention_backward(dout, q, k, v, out, lse, samples, *words)

    def forward(q: Tensor, k: Tensor, v: Tensor, samples: Tensor) -> Tensor:
        return flash_attention.flash_attention_forward(q, k, v, samples, *words)[0]

    yield Case("flash_attention_forward", label, inputs, forward, exact, rival, 4 * floor)
    yield Case("flash_attention_backward", label, backward_inputs, backward, gradients(exact, 3), rival, 8 * floor,
               leaves=3)  # fmt: skip
