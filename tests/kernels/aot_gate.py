"""Compiles every kernel for one architecture and prints one JSON line each: a process of its own, free of the
interpreter. ``python tests/kernels/aot_gate.py 90``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests.kernels import aot
from trimegatron.kernels import adamw, attention_dropout, bias_dropout_add, bias_gelu, column_sum, layer_norm, softmax

HIDDEN_SIZES = (768, 1024, 4096)
TILED = 768  # ops that cut the hidden size into tiles compile to the same loop at every size
Case = tuple[str, Callable[[], Any]]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _row_ops(hidden: int, dtype: torch.dtype) -> Iterator[Case]:
    x, w, statistics = _meta(512, 16, hidden, dtype=dtype), _meta(hidden, dtype=dtype), _meta(8192, dtype=torch.float32)
    scores, mask = _meta(2, 4, hidden, hidden, dtype=dtype), _meta(2, 1, hidden, hidden, dtype=torch.bool)
    yield "layer_norm_forward", lambda: layer_norm.layer_norm_forward(x, w, w, 1e-5)
    yield "layer_norm_backward", lambda: layer_norm.layer_norm_backward(x, x, w, statistics, statistics)
    yield "causal_softmax_forward", lambda: softmax.scaled_causal_softmax_forward(scores, 0.5)
    yield "causal_softmax_backward", lambda: softmax.scaled_softmax_backward(scores, scores, 0.5, True)
    if hidden == max(HIDDEN_SIZES):
        yield "masked_softmax_forward", lambda: softmax.scaled_masked_softmax_forward(scores, mask, 0.5)
        yield "masked_softmax_backward", lambda: softmax.scaled_softmax_backward(scores, scores, 0.5, False)


def _tiled_ops(hidden: int, dtype: torch.dtype) -> Iterator[Case]:
    x, w, samples = _meta(512, 16, hidden, dtype=dtype), _meta(hidden, dtype=dtype), _meta(16, dtype=torch.int64)
    long = _meta(2, 2, 64, 65536, dtype=dtype)
    p, g = _meta(1 << 20, dtype=torch.float32), _meta(1 << 20, dtype=dtype)
    low = g if dtype != torch.float32 else None
    mask_of = (1234, 2, 3, 0)
    yield "bias_gelu_forward", lambda: bias_gelu.bias_gelu_forward(x, w, "tanh")
    yield "bias_gelu_backward", lambda: bias_gelu.bias_gelu_backward(x, x, w, "tanh")
    yield "bias_gelu_backward_erf", lambda: bias_gelu.bias_gelu_backward(x, x, w, "none")
    yield "dropout_forward", lambda: bias_dropout_add.bias_dropout_add_forward(x, w, x, samples, 0.1, *mask_of)
    yield "dropout_backward", lambda: bias_dropout_add.bias_dropout_add_backward(x, w, samples, dtype, 0.1, *mask_of)
    yield "add_forward", lambda: bias_dropout_add.bias_dropout_add_forward(x, w, x, None, 0.0, *mask_of)
    yield "column_sum", lambda: column_sum.column_sum(x, dtype)
    yield "attention_dropout", lambda: attention_dropout.attention_dropout(long, samples[:2], 0.1, 1234, 3, 0, 0)
    yield "long_softmax_forward", lambda: softmax.scaled_causal_softmax_forward(long, 0.5)
    yield "long_softmax_backward", lambda: softmax.scaled_softmax_backward(long, long, 0.5, True)
    yield "adamw", lambda: adamw.adamw_step_(p, p, p, g, _meta(9, dtype=torch.float32), 1000, low)
    yield "sum_of_squares", lambda: adamw.sum_of_squares(g)


def cases() -> Iterator[tuple[str, aot.Launch]]:
    """(name/hidden/dtype, launch) of the kernel of each op; the small second stages of sums are the same everywhere."""
    for dtype in (torch.bfloat16, torch.float32):
        lists = [(hidden, _row_ops(hidden, dtype)) for hidden in HIDDEN_SIZES] + [(TILED, _tiled_ops(TILED, dtype))]
        for hidden, ops in lists:
            for name, call in ops:
                yield f"{name}/{hidden}/{str(dtype).removeprefix('torch.')}", aot.record(call)[0]
    w = _meta(768, dtype=torch.bfloat16)
    x, statistics = _meta(64, 768, dtype=torch.bfloat16), _meta(64, dtype=torch.float32)
    yield "sum_partials/768/bfloat16", aot.record(lambda: layer_norm.layer_norm_backward(x, x, w, *[statistics] * 2))[1]
    yield "total/-/bfloat16", aot.record(lambda: adamw.sum_of_squares(w))[1]


if __name__ == "__main__":
    for case, launch in cases():
        code = aot.measure(launch, int(sys.argv[1]))
        print(json.dumps({"case": case, "text": str(code), **vars(code)}), flush=True)
