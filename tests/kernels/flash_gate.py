"""Compiles flash attention for one architecture and prints one JSON line per kernel: a process of its own.

``python -m tests.kernels.flash_gate 90 [START_OF_A_CASE …]``. Per kernel: what ``aot.py`` reads, and the instructions
per score of its loop without the diagonal, by pipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor

from trimegatron.bench import aot, pipes
from trimegatron.bench.traffic import limits
from trimegatron.kernels import flash_attention, flash_attention_backward, launcher

KERNELS = ("forward", "queries", "keys")
VARIANTS = {"dropout": (True, False), "documents": (True, True), "plain": (False, False)}
SHAPES = [
    (64, torch.bfloat16, "dropout"),
    (128, torch.bfloat16, "dropout"),
    (64, torch.bfloat16, "documents"),
    (128, torch.bfloat16, "documents"),
    (64, torch.bfloat16, "plain"),
    (128, torch.bfloat16, "plain"),
    (72, torch.bfloat16, "dropout"),
    (64, torch.float32, "dropout"),
]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def launches(head_size: int, dtype: torch.dtype, drops: bool, documents: bool) -> list[aot.Launch]:
    """Of the three kernels, for views of the model's projection."""
    s, b, n = 2048, 2, 5
    q, k, v = (x.permute(1, 2, 0, 3) for x in _meta(s, b, n, 3, head_size, dtype=dtype).unbind(3))
    out, lse = _meta(s, b, n, head_size, dtype=dtype).permute(1, 2, 0, 3), _meta(b, n, s, dtype=torch.float32)
    samples = _meta(b, dtype=torch.int64) if drops else None
    starts = _meta(b, s, dtype=torch.int64) if documents else None
    rest = (samples, starts, 0.1, 0.1 if drops else 0.0, 1234, 3, 0)
    return aot.record(lambda: flash_attention.flash_attention_forward(q, k, v, *rest)) + aot.record(
        lambda: flash_attention_backward.flash_attention_backward(out, q, k, v, out, lse, *rest)
    )


def cases(arch: int) -> Iterator[tuple[str, aot.Launch]]:
    """(kernel/head size/dtype/variant, launch), with the tiles of the architecture."""
    for head_size, dtype, variant in SHAPES:
        with mock.patch.object(launcher, "architecture", lambda device: arch):
            made = launches(head_size, dtype, *VARIANTS[variant])
        for name, launch in zip(KERNELS, made, strict=True):
            yield f"{name}/{head_size}/{str(dtype).removeprefix('torch.')}/{variant}", launch


if __name__ == "__main__":
    architecture, wanted = int(sys.argv[1]), tuple(sys.argv[2:]) or ("",)
    for case, launch in cases(architecture):
        if case.startswith(wanted):
            code = aot.measure(launch, architecture)
            scores = launch.config.rows * launch.config.columns / (32 * launch.config.num_warps)
            # Two loops, with and without the diagonal: the shorter one is walked once per tile of the matrix.
            products = [loop for loop in code.loops if loop["tensor"]]
            loop = min(products, key=lambda counts: counts.total(), default=None)
            per_score = {pipe: round(n / scores, 2) for pipe, n in loop.items()} if loop else {}
            busy = {name: limits(launch, code, device) for name, device in pipes.DEVICES.items()} if loop else {}
            figures = {"per_score": per_score, "busy": {name: limit._asdict() for name, limit in busy.items()}}
            print(json.dumps({"case": case, "text": str(code), **figures, **vars(code)}), flush=True)
