"""What is refused, what is imported, and that ``impl="auto"`` on a CPU is the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from trimegatron.kernels import functional, reference

X, W = torch.zeros(2, 3, 4), torch.zeros(4)
SAMPLES = torch.tensor([1, 2, 3])
MASK: dict[str, Any] = {"p": 0.1, "seed": 0, "sample_numbers": SAMPLES, "layer": 0}
FLAT = [torch.zeros(64) for _ in range(4)]
RUNS = functional.AdamWRuns([functional.Run(0, 0, 64, True)])
IDS = torch.zeros(2, 3, dtype=torch.int64)
SCALARS = torch.zeros(functional.NUM_ADAMW_SCALARS)


def test_training_on_a_cpu_never_imports_triton() -> None:
    program = """
import sys, torch
from trimegatron.kernels import functional as f
x = torch.ones(2, 1, 4, requires_grad=True)
y = f.layer_norm(f.bias_gelu(x, torch.ones(4)), torch.ones(4), torch.ones(4))
f.bias_dropout_add(y, None, x, p=0.5, seed=1, sample_numbers=torch.tensor([3]), site=2, layer=0).sum().backward()
f.scaled_causal_softmax(torch.ones(1, 1, 2, 2))
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_auto_on_a_cpu_is_the_reference() -> None:
    x = torch.randn(2, 3, 4)
    assert torch.equal(functional.layer_norm(x, W + 1, W), reference.layer_norm_forward(x, W + 1, W, 1e-5)[0])


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_triton_on_a_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="must have its tensors on a GPU; got cpu"):
        functional.layer_norm(X, W, W, impl="triton")


def test_unknown_impl_is_refused() -> None:
    with pytest.raises(ValueError, match=r'impl \("cuda"\) must be'):
        functional.bias_gelu(X, W, impl="cuda")


HEADS = torch.zeros(3, 2, 5, 8)


def attend(q: Any = HEADS, k: Any = HEADS, v: Any = HEADS, **changes: Any) -> Any:
    return functional.flash_attention(q, k, v, **(MASK | {"scale": 1.0} | changes))


REFUSED = {
    "weight's length": ("weight", lambda: functional.layer_norm(X, W[:3], W)),
    "bias's dtype": ("bias", lambda: functional.layer_norm(X, W, W.half())),
    "gelu's form": ("approximate", lambda: functional.bias_gelu(X, W, "sigmoid")),
    "residual's shape": (
        "residual", lambda: functional.bias_dropout_add(X, W, X[:1], site=0, **MASK)),
    "x's shape": ("x", lambda: functional.bias_dropout_add(X[0], W, None, site=0, **MASK)),
    "p": ("p", lambda: functional.bias_dropout_add(X, W, None, site=0, **(MASK | {"p": 1.0}))),
    "seed": ("seed", lambda: functional.bias_dropout_add(X, W, None, site=0, **(MASK | {"seed": 1 << 32}))),
    "samples' number": (
        "sample_numbers",
        lambda: functional.bias_dropout_add(X, W, None, site=0, **(MASK | {"sample_numbers": SAMPLES[:2]}))),
    "samples' dtype": (
        "sample_numbers",
        lambda: functional.bias_dropout_add(X, W, None, site=0, **(MASK | {"sample_numbers": SAMPLES.int()}))),
    "no samples": (
        "sample_numbers",
        lambda: functional.attention_dropout(torch.zeros(3, 1, 1, 1), **(MASK | {"sample_numbers": None}))),
    "scores' shape": ("scores", lambda: functional.scaled_causal_softmax(X)),
    "mask's dtype": ("mask", lambda: functional.scaled_masked_softmax(X[None], torch.zeros(1, 1, 1, 4))),
    "mask's shape": (
        "mask", lambda: functional.scaled_masked_softmax(X[None], torch.zeros(1, 2, 3, 3, dtype=torch.bool))),
    "target's shape": ("target", lambda: functional.cross_entropy(X, torch.zeros(2, dtype=torch.int64))),
    "target's dtype": ("target", lambda: functional.cross_entropy(X, torch.zeros(2, 3))),
    "number of words": ("num_valid", lambda: functional.cross_entropy(X, IDS, num_valid=5)),
    "smoothing": ("label_smoothing", lambda: functional.cross_entropy(X, IDS, label_smoothing=1.0)),
    "smoothing of one word": (
        "label_smoothing", lambda: functional.cross_entropy(X, IDS, num_valid=1, label_smoothing=0.1)),
    "upstream's shape": ("upstream", lambda: functional.cross_entropy(X, IDS, upstream=X)),
    "upstream in place": ("upstream", lambda: functional.cross_entropy(X, IDS, upstream=X[..., 0], in_place=True)),
    "total's shape": ("residual", lambda: functional.add_layer_norm(X, X[0], W, W)),
    "x_bias's length": (
        "x_bias", lambda: functional.bias_dropout_add_layer_norm(X, W[:3], X, W, W, site=0, **MASK)),
    "dy's shape": ("dy", lambda: functional.bias_gelu_backward_with_activation(X[0], X, W)),
    "keys' shape": ("q, k and v", lambda: attend(k=torch.zeros(3, 3, 5, 8))),
    "values' shape": ("q, k and v", lambda: attend(v=HEADS[..., :4])),
    "keys' dtype": ("q, k and v", lambda: attend(k=HEADS.half())),
    "a wide head": ("q", lambda: attend(*[torch.zeros(3, 2, 5, 136)] * 3)),
    "scale": ("scale", lambda: attend(scale=0.0)),
    "starts' dtype": ("document_starts", lambda: attend(document_starts=torch.zeros(3, 5, dtype=torch.int32))),
    "starts' shape": ("document_starts", lambda: attend(document_starts=torch.zeros(5, dtype=torch.int64))),
    "attention's samples": ("sample_numbers", lambda: attend(sample_numbers=None)),
    "master's dtype": (
        "param", lambda: functional.adamw_step_(FLAT[0].half(), *FLAT[1:], SCALARS, runs=RUNS)),
    "grad's length": ("param", lambda: functional.adamw_step_(*FLAT[:3], W[:3], SCALARS, runs=RUNS)),
    "a run's end": (
        "runs",
        lambda: functional.adamw_step_(*FLAT, SCALARS, runs=functional.AdamWRuns([functional.Run(64, 0, 64, True)]))),
    "a run's start": ("runs", lambda: functional.AdamWRuns([functional.Run(0, 32, 64, True)])),
    "scalars": ("scalars", lambda: functional.adamw_step_(*FLAT, SCALARS[:8], runs=RUNS)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_named(case: str) -> None:
    name, call = REFUSED[case]
    with pytest.raises(ValueError, match=rf"^{name}\b.* must "):
        call()


def test_scalars_are_in_the_order_of_the_enum() -> None:
    values = functional.adamw_scalars(lr=1, weight_decay=2, beta1=0.5, beta2=0.75, eps=5, step=2, grad_multiplier=8,
                                      found_inf=9)  # fmt: skip
    names = [scalar.name.lower() for scalar in functional.AdamWScalar]
    expected = {"lr": 1, "weight_decay": 2, "beta1": 0.5, "beta2": 0.75, "eps": 5, "bias_correction1": 0.75,
                "bias_correction2": 1 - 0.75**2, "grad_multiplier": 8, "found_inf": 9}  # fmt: skip
    assert dict(zip(names, values, strict=True)) == expected
