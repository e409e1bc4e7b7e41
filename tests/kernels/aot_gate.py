"""Compiles every kernel for one architecture and prints one JSON line each: a process of its own, free of the
interpreter. ``python -m tests.kernels.aot_gate 90 [START_OF_A_CASE …]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench import aot, pipes
from trimegatron.bench.traffic import limits
from trimegatron.kernels import (
    adamw,
    add_layer_norm,
    attention_dropout,
    bias_dropout_add,
    bias_gelu,
    column_sum,
    cross_entropy,
    layer_norm,
    softmax,
)

HIDDEN_SIZES = {torch.bfloat16: (768, 1024, 4096, 16384), torch.float32: (4096, 16384)}
TILED = 768  # ops that cut the hidden size into tiles compile to the same loop at every size
WIDEST_VOCABULARY = 128256
Case = tuple[str, Callable[[], Any]]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _norm_name(hidden: int) -> str:
    """A loop that reads the weight of another part of the row in every step is another one."""
    return "layer_norm_backward" if hidden <= 8192 else "layer_norm_backward_in_parts"


def _row_ops(hidden: int, dtype: torch.dtype) -> Iterator[Case]:
    x, w, statistics = _meta(512, 16, hidden, dtype=dtype), _meta(hidden, dtype=dtype), _meta(8192, dtype=torch.float32)
    scores, mask = _meta(2, 4, hidden, hidden, dtype=dtype), _meta(2, 1, hidden, hidden, dtype=torch.bool)
    yield "layer_norm_forward", lambda: layer_norm.layer_norm_forward(x, w, w, 1e-5)
    yield _norm_name(hidden), lambda: layer_norm.layer_norm_backward(x, x, w, statistics, statistics)
    yield "causal_softmax_forward", lambda: softmax.scaled_causal_softmax_forward(scores, 0.5)
    yield "causal_softmax_backward", lambda: softmax.scaled_softmax_backward(scores, scores, 0.5, True)
    samples, rows = _meta(2, dtype=torch.int64), _meta(2, 8 * hidden, dtype=torch.float32)
    drop = (samples, 0.5, True, 0.1, 1234, 3, 0, 0)
    yield "softmax_dropout_forward", lambda: softmax.softmax_dropout_forward(scores, None, *drop)
    yield "softmax_dropout_backward", lambda: softmax.softmax_dropout_backward(scores, scores, None, rows, *drop)
    if hidden == 4096:
        yield "masked_softmax_forward", lambda: softmax.scaled_masked_softmax_forward(scores, mask, 0.5)
        yield "masked_softmax_backward", lambda: softmax.scaled_softmax_backward(scores, scores, 0.5, False)


def _tiled_ops(hidden: int, dtype: torch.dtype) -> Iterator[Case]:
    x, w, samples = _meta(512, 16, hidden, dtype=dtype), _meta(hidden, dtype=dtype), _meta(16, dtype=torch.int64)
    long = _meta(2, 2, 64, 65536, dtype=dtype)
    p, g = _meta(1 << 20, dtype=torch.float32), _meta(1 << 20, dtype=dtype)
    tiles = _meta(1024, 4, dtype=torch.int32)
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
    long_mask, long_rows = _meta(2, 1, 64, 65536, dtype=torch.bool), _meta(2, 256, dtype=torch.float32)
    drop = (samples[:2], 0.5, True, 0.1, 1234, 3, 0, 0)
    yield "long_masked_softmax", lambda: softmax.scaled_masked_softmax_forward(long, long_mask, 0.5)
    yield "long_softmax_dropout_forward", lambda: softmax.softmax_dropout_forward(long, None, *drop)
    yield "long_softmax_dropout_backward", lambda: softmax.softmax_dropout_backward(long, long, None, long_rows, *drop)
    yield "adamw", lambda: adamw.adamw_step_(p, p, p, g, _meta(9, dtype=torch.float32), tiles, low)
    yield "sum_of_squares", lambda: adamw.sum_of_squares(g)


def _vocabulary_ops(columns: int, dtype: torch.dtype) -> Iterator[Case]:
    logits, target = _meta(64, columns, dtype=dtype), _meta(64, dtype=torch.int64)
    numbers, words = _meta(64, dtype=torch.float32), (0, columns, -100, 0.8, 0.01)
    yield "cross_entropy_both", lambda: cross_entropy.cross_entropy_forward(logits, target, numbers, *words[1:])
    if columns == WIDEST_VOCABULARY:  # only the first is another kernel there
        return
    yield "cross_entropy_statistics", lambda: cross_entropy.cross_entropy_statistics(logits, target, *words[:2], True)
    yield "cross_entropy_loss", lambda: cross_entropy.cross_entropy_forward(logits, target, None, *words[1:])
    gradient = (logits, target, numbers, numbers)
    yield "cross_entropy_mend", lambda: cross_entropy.cross_entropy_mend_(logits, *gradient, numbers, *words)


def _norm_ops(hidden: int, dtype: torch.dtype) -> Iterator[Case]:
    x, w, numbers = _meta(32, 2, hidden, dtype=dtype), _meta(hidden, dtype=dtype), _meta(64, dtype=torch.float32)
    samples, mask_of = _meta(2, dtype=torch.int64), (0.1, 1234, 2, 3, 0)
    forward = add_layer_norm.bias_dropout_add_layer_norm_forward
    backward = add_layer_norm.bias_dropout_add_layer_norm_backward
    saved = (x, w, numbers, numbers)
    yield "add_norm_backward", lambda: backward(x, x, *saved, None, None, dtype, True, *mask_of)
    yield "dropout_norm_forward", lambda: forward(x, w, x, w, w, samples, 1e-5, False, *mask_of)
    yield "dropout_norm_backward", lambda: backward(x, x, *saved, w, samples, dtype, False, *mask_of)
    if hidden not in HIDDEN_SIZES[dtype]:
        yield _norm_name(hidden), lambda: layer_norm.layer_norm_backward(x, *saved)


def _wide_cases(arch: int) -> Iterator[tuple[str, aot.Launch]]:
    """Rows that are wide, or do not start on 16 bytes; in fp32, which is wider still, on one architecture."""
    bf16, fp32 = torch.bfloat16, torch.float32
    lists = [(h, _norm_ops(h, bf16), bf16) for h in (4096, 12288, 16384)]
    lists += [(v, _vocabulary_ops(v, bf16), bf16) for v in (50304, 50257, WIDEST_VOCABULARY)]
    if arch == 90:
        lists += [(16384, _norm_ops(16384, fp32), fp32), (50304, _vocabulary_ops(50304, fp32), fp32)]
    for size, ops, dtype in lists:
        for name, call in ops:
            yield f"{name}/{size}/{str(dtype).removeprefix('torch.')}", aot.record(call)[0]
    x, w = _meta(64, TILED, dtype=bf16), _meta(TILED, dtype=bf16)
    both = aot.record(lambda: bias_gelu.bias_gelu_backward_with_activation(x, x, w, "tanh"))[0]
    yield f"bias_gelu_backward_with_activation/{TILED}/bfloat16", both


def cases(arch: int) -> Iterator[tuple[str, aot.Launch]]:
    """(name/hidden/dtype, launch) of the kernel of each op; the small second stages of sums are the same everywhere."""
    for dtype, hidden_sizes in HIDDEN_SIZES.items():
        lists = [(hidden, _row_ops(hidden, dtype)) for hidden in hidden_sizes] + [(TILED, _tiled_ops(TILED, dtype))]
        for hidden, ops in lists:
            for name, call in ops:
                yield f"{name}/{hidden}/{str(dtype).removeprefix('torch.')}", aot.record(call)[0]
    yield from _wide_cases(arch)
    w = _meta(768, dtype=torch.bfloat16)
    x, statistics = _meta(64, 768, dtype=torch.bfloat16), _meta(64, dtype=torch.float32)
    yield "sum_partials/768/bfloat16", aot.record(lambda: layer_norm.layer_norm_backward(x, x, w, *[statistics] * 2))[1]
    yield "total/-/bfloat16", aot.record(lambda: adamw.sum_of_squares(w))[1]


if __name__ == "__main__":
    architecture, wanted = int(sys.argv[1]), tuple(sys.argv[2:]) or ("",)
    for case, launch in cases(architecture):
        if not case.startswith(wanted):
            continue
        code = aot.measure(launch, architecture)
        figures = {
            name: getattr(code, name) for name in ("occupancy", "bytes_in_flight", "loaded_bytes", "stored_bytes")
        }
        figures["busy"] = {name: limits(launch, code, device).share for name, device in pipes.DEVICES.items()}
        tile = launch.config.rows * launch.config.columns
        print(json.dumps({"case": case, "text": str(code), "tile": tile, **figures, **vars(code)}), flush=True)
