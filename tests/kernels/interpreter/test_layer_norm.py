from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, compare, layouts
from trimegatron.kernels import functional, layer_norm

EPS = 1e-5


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + EPS) * weight + bias


def op(impl: str):
    return lambda x, weight, bias: functional.layer_norm(x, weight, bias, EPS, impl=impl)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    x = torch.randn(shape) * 2 + 3  # a mean that padding lanes would show
    return [x.to(dtype), (torch.rand(shape[-1]) + 0.5).to(dtype), torch.randn(shape[-1]).to(dtype)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hidden", [5, 17, 100, 768, 1000, 1001, 1024, 3000, 8200])
def test_values_and_gradients(guards: Guards, impl: str, hidden: int) -> None:
    # Means of 3 at a deviation of 2 cost a digit in fp32.
    compare(guards, op(impl), formula, inputs(7, 3, hidden), tolerance=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(1, 2)], ids=["both", "residual", "norm"])
def test_with_residual(guards: Guards, impl: str, dtype: torch.dtype, which: slice) -> None:
    """The gradients of both results are added; where one result is not used, the other's is all."""

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.stack(functional.layer_norm_with_residual(x, weight, bias, EPS, impl=impl)[which])

    def exact(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.stack((x, formula(x, weight, bias))[which])

    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    compare(guards, run, exact, inputs(7, 3, 40, dtype=dtype), tolerance=tolerance)


def test_the_residual_is_x_itself() -> None:
    x, weight, bias = torch.randn(2, 8, requires_grad=True), torch.ones(8), torch.zeros(8)
    residual, _ = functional.layer_norm_with_residual(x, weight, bias, impl="triton")
    assert residual.data_ptr() == x.data_ptr() and torch.equal(residual, x)


@pytest.mark.parametrize("impl", IMPLS)
def test_one_column(guards: Guards, impl: str) -> None:
    """The normalised value is 0 whatever x, and so is its gradient; torch's own leaves roundings times 1/sqrt(eps)."""
    compare(guards, op(impl), formula, inputs(70, 1), tolerance=1e-5 if impl == "triton" else 1e-3)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(guards: Guards, impl: str, dtype: torch.dtype) -> None:
    compare(guards, op(impl), formula, inputs(9, 200, dtype=dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_fp32_parameters_with_bf16_activations(guards: Guards, impl: str) -> None:
    x, weight, bias = inputs(9, 64)
    assert x is not None
    compare(guards, op(impl), formula, [x.bfloat16(), weight, bias], sum_tolerance=1e-5)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_layouts(guards: Guards, layout: str) -> None:
    x, weight, bias = inputs(6, 4, 40)
    assert x is not None
    upstream = layouts(torch.randn(x.shape))[layout]
    compare(guards, op("triton"), formula, [layouts(x)[layout], weight, bias], upstream=upstream, tolerance=1e-5)


def test_expanded_incoming_gradient(guards: Guards) -> None:
    compare(guards, op("triton"), formula, inputs(6, 40), upstream=torch.ones(()).expand(6, 40), tolerance=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(guards: Guards, impl: str, shape: tuple[int, ...]) -> None:
    x, weight, bias = (None if t is None else t.requires_grad_() for t in inputs(*shape))
    y = op(impl)(x, weight, bias)
    y.sum().backward()
    assert y.shape == shape
    assert x is not None and weight is not None and bias is not None
    assert x.grad is not None and x.grad.shape == shape
    assert torch.equal(weight.grad, torch.zeros(8)) and torch.equal(bias.grad, torch.zeros(8))


@pytest.mark.parametrize("hidden", [100, 161])
def test_rows_cut_into_parts(guards: Guards, monkeypatch: pytest.MonkeyPatch, hidden: int) -> None:
    """As rows wider than 8192 are, of which the last part is narrower; more rows than programs."""
    monkeypatch.setattr(layer_norm, "_WIDEST_PART", 64)
    compare(guards, op("triton"), formula, inputs(11, 3, hidden), tolerance=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_zero_centred_weight(guards: Guards, monkeypatch: pytest.MonkeyPatch, impl: str) -> None:
    def op(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, weight, bias, EPS, zero_centred=True, impl=impl)

    for widest in (8192, 32):
        monkeypatch.setattr(layer_norm, "_WIDEST_PART", widest)
        arguments = inputs(6, 100)
        compare(guards, op, lambda x, weight, bias: formula(x, weight + 1, bias), arguments, tolerance=1e-5)


def test_statistics_survive_a_large_mean(guards: Guards) -> None:
    """The variance is taken about the mean; a mean of squares would lose it here."""
    x, weight, bias = inputs(4, 256)
    assert x is not None
    compare(guards, op("triton"), formula, [x + 1000, weight, bias], tolerance=2e-3)


def test_same_bits_every_time(guards: Guards) -> None:
    x, weight, bias = inputs(300, 33)
    grads = []
    for _ in range(2):
        w = weight.clone().requires_grad_()
        op("triton")(x, w, bias).square().sum().backward()
        grads.append(w.grad)
    assert torch.equal(*grads)
