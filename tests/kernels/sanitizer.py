"""The kernels under triton-viz's sanitizer, which proves for all programs at once that no access leaves its tensor: the
interpreter reads past a view inside its allocation without a word.

By hand, in an environment of its own, since triton-viz 3.0 does not work with newer versions of Triton::

    python -m venv sanitizer && sanitizer/bin/pip install triton-viz==3.0 triton==3.6.0 torch numpy
    TRITON_INTERPRET=1 sanitizer/bin/python -m tests.kernels.sanitizer

What it cannot follow is taken out of its way where no address depends on it: Philox and the attention masks' mapping
(it has no cast of constants and no permutation). It cannot follow flash attention (a transposed tile has no shape
there, a loop no end that was loaded) nor the erf of bias-GELU: those are held by the guards of the interpreter's tests
alone. Two kernels that read past their view must be found. Exits 1 where one of ours is not clean.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from trimegatron.kernels import (
    adamw,
    adamw_runs,
    add_layer_norm,
    attention_dropout,
    bias_dropout_add,
    bias_gelu,
    column_sum,
    cross_entropy,
    cross_entropy_rows,
    launcher,
    layer_norm,
    philox_triton,
    softmax,
)

P, SEED, LAYER = 0.1, 1234, 3
WITH_LOOPS = (adamw, column_sum, bias_dropout_add, bias_gelu, cross_entropy, cross_entropy_rows, layer_norm,
              philox_triton, softmax)  # fmt: skip


@triton.jit
def _reads_one_past(x, n, COLUMNS: tl.constexpr):
    i = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(x + i, tl.load(x + i, mask=i < n + 1, other=0.0), mask=i < n)


@triton.jit
def _writes_without_a_mask(x, n, COLUMNS: tl.constexpr):
    for start in tl.range(0, n, COLUMNS):
        tl.store(x + start + tl.arange(0, COLUMNS), 0.0)


@triton.jit
def _no_philox(c0, c1, c2, c3, k0, k1, ROUNDS: tl.constexpr):
    word = c0 + c1 + c2 + c3
    return word, word, word, word


@triton.jit
def _no_mapping(
    query, column_start, sample, seed, stream, position_offset, threshold, R: tl.constexpr, C: tl.constexpr
):
    return query[:, None] + (column_start + tl.arange(0, C))[None, :] >= 0


def calls(h: int) -> dict[str, Callable[[], Any]]:
    """Of every launcher, at rows of ``h`` elements that no tile fits; nothing is computed, so values do not matter."""
    x, w, rows = torch.zeros(5, 3, h), torch.zeros(h), torch.zeros(15)
    logits, target, words = x.view(15, h), torch.zeros(15, dtype=torch.int64), (h - 3, -100, 0.9, 0.01)
    scores, mask = torch.zeros(2, 3, 7, h), torch.zeros(2, 1, 7, h, dtype=torch.bool)
    samples, statistics = torch.zeros(3, dtype=torch.int64), torch.zeros(2, 42)
    hidden, attention = (P, SEED, 2, LAYER, 1), (samples[:2], 0.5, True, P, SEED, LAYER, 0, 0)
    flat, scalars = torch.zeros(192), torch.zeros(9)
    tiles = adamw_runs.AdamWRuns([adamw_runs.Run(64, 0, 128, True)]).tiles(flat.device)
    norm = add_layer_norm.bias_dropout_add_layer_norm_backward
    return {
        "layer norm": lambda: (
            layer_norm.layer_norm_forward(x, w, w, 1e-5),
            layer_norm.layer_norm_backward(x, x, w, rows, rows, False, x),
        ),
        "dropout, addition, norm": lambda: (
            add_layer_norm.bias_dropout_add_layer_norm_forward(x, w, x, w, w, samples, 1e-5, False, *hidden),
            norm(x, x, x, w, rows, rows, w, samples, x.dtype, False, *hidden),
        ),
        "dropout, addition": lambda: (
            bias_dropout_add.bias_dropout_add_forward(x, w, x, samples, *hidden),
            bias_dropout_add.bias_dropout_add_backward(x, w, samples, x.dtype, *hidden),
        ),
        "bias-GELU": lambda: (
            bias_gelu.bias_gelu_forward(x, w, "tanh"),
            bias_gelu.bias_gelu_backward_with_activation(x, x, w, "tanh"),
        ),
        "softmax": lambda: (
            softmax.scaled_causal_softmax_forward(scores, 0.5),
            softmax.scaled_masked_softmax_forward(scores, mask, 0.5),
            softmax.scaled_softmax_backward(scores, scores, 0.5, True),
            softmax.softmax_dropout_forward(scores, mask, *attention),
            softmax.softmax_dropout_backward(scores, scores, mask, statistics, *attention),
        ),
        "attention dropout": lambda: attention_dropout.attention_dropout(scores, samples[:2], P, SEED, LAYER, 0, 0),
        "cross entropy": lambda: (
            cross_entropy.cross_entropy_statistics(logits, target, 0, h - 3, True),
            cross_entropy.cross_entropy_forward(logits, target, None, *words),
            cross_entropy.cross_entropy_forward(logits, target, rows, *words),
            cross_entropy.cross_entropy_backward(logits, target, rows, rows, 2, *words),
        ),
        "sums": lambda: (column_sum.column_sum(x, x.dtype), adamw.sum_of_squares(x)),
        "AdamW": lambda: adamw.adamw_step_(flat, flat[:128], flat[:128], flat, scalars, tiles, None),
    }


def set_up() -> Callable[..., list[Any]]:
    """A launch that gives what the sanitizer found. It knows how to write floor division, but not to run it; and it
    gives the loops of a kernel a patched ``range``, but not those of its device functions in other files."""
    expressions, patch, trace = (
        importlib.import_module(f"triton_viz.{name}")
        for name in ("clients.sanitizer.sanitizer", "core.patch", "core.trace")
    )
    binary = expressions.BinarySymbolicExpr
    concretize = binary.concretize

    def with_division(self: Any) -> Any:
        if self.op == "idiv":
            return self.concrete_fn(self.lhs.concretize(), self.rhs.concretize())
        return concretize(self)

    binary.concretize = with_division
    for module in WITH_LOOPS:
        vars(module)["_triton_viz_loop_patcher"] = patch._loop_patcher
    philox_triton.philox4x32 = _no_philox
    attention_dropout.attention_keep = _no_mapping

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, config: Any, **constants: Any) -> list[Any]:
        traced = trace.TritonTrace(kernel, expressions.Sanitizer(abort_on_error=False))
        traced[grid](*args, num_warps=config.num_warps, num_stages=config.num_stages, **constants)
        return [record for client in traced.client_manager.clients.values() for record in client.records]

    return launch


def main() -> int:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    launch, found = set_up(), {}

    def keep(kernel: Any, *args: Any, **kwargs: Any) -> None:
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        records = launch(kernel, *args, **kwargs)
        found[name] = [*found.get(name, []), *records]
        for record in records:
            print(f"{name}: {record}")

    view, config = torch.zeros(64)[:20], launcher.Config(1, 16, 4)
    for kernel in (_reads_one_past, _writes_without_a_mask):
        assert launch(kernel, (2,), view, 20, config=config, COLUMNS=16), f"{kernel.fn.__name__} must be found"
    with mock.patch.object(launcher, "launch", keep):
        for h in (24, 33, 300):
            for name, call in calls(h).items():
                print(f"{name}, rows of {h}", flush=True)
                call()
                if name == "softmax":
                    with mock.patch.object(softmax, "_LONGEST_ROW_IN_REGISTERS", 16):
                        call()
                if name == "layer norm":
                    with mock.patch.object(layer_norm, "_WIDEST_PART", 16):
                        call()
    print(f"{len(found)} kernels: {', '.join(sorted(found))}")
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
