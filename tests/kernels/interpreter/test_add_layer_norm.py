"""Residual add, dropout and layer norm in one pass, against the formula of the three one after another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, compare, layouts
from trimegatron.kernels import functional, layer_norm, philox

P = 0.3
SAMPLES = torch.tensor([7, (5 << 32) + 0x80000001, 3])
MASK = {"seed": 0xFFFFFFF0, "site": functional.Site.MLP_OUTPUT, "layer": 5, "position_offset": 100}
Arguments = list[Tensor | None]


def op(impl: str, p: float = P, **given: Any):
    """Total and normalised value, stacked, so that both receive a gradient."""

    def run(*arguments: Tensor | None) -> Tensor:
        given_all = {"p": p, "sample_numbers": SAMPLES, "impl": impl} | MASK | given
        return torch.stack(functional.bias_dropout_add_layer_norm(*arguments, **given_all))

    return run


def formula(p: float = P):
    def run(x: Tensor, x_bias: Tensor | None, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        value = x if x_bias is None else x + x_bias
        if p:
            keep = philox.hidden_keep_mask(x.shape, SAMPLES, p=p, **MASK)
            value = value * keep * (65536 / (65536 - round(65536 * p)))
        total = residual + value
        variance, mean = torch.var_mean(total, dim=-1, correction=0, keepdim=True)
        return torch.stack([total, (total - mean) / torch.sqrt(variance + 1e-5) * weight + bias])

    return run


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Arguments:
    h = shape[-1]
    each = torch.randn(shape), torch.randn(h), torch.randn(shape) * 2 + 3, torch.rand(h) + 0.5, torch.randn(h)
    return [t.to(dtype) for t in each]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hidden", [5, 100, 1000, 1025])
@pytest.mark.parametrize("p", [0.0, P])
def test_values_and_gradients(guards: Guards, impl: str, hidden: int, p: float) -> None:
    compare(guards, op(impl, p), formula(p), inputs(5, 3, hidden), tolerance=1e-5)


@pytest.mark.parametrize("hidden", [100, 161])
@pytest.mark.parametrize("p", [0.0, P])
def test_rows_cut_into_parts(guards: Guards, monkeypatch: pytest.MonkeyPatch, hidden: int, p: float) -> None:
    monkeypatch.setattr(layer_norm, "_WIDEST_PART", 64)
    compare(guards, op("triton", p), formula(p), inputs(4, 3, hidden), tolerance=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("p", [0.0, P])
def test_without_bias(guards: Guards, impl: str, p: float) -> None:
    x, _, *others = inputs(4, 3, 40)
    compare(guards, op(impl, p), formula(p), [x, None, *others], tolerance=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(guards: Guards, impl: str, dtype: torch.dtype) -> None:
    compare(
        guards, op(impl), formula(), inputs(4, 3, 72, dtype=dtype), tolerance=4e-3 if dtype == torch.float16 else 3e-2
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("p", [0.0, P])
def test_fp32_residual_and_parameters_of_bf16_activations(guards: Guards, impl: str, p: float) -> None:
    """The total is fp32 then, and the gradient of x is rounded once."""
    x, x_bias, *others = inputs(4, 3, 40)
    assert x is not None and x_bias is not None
    arguments: Arguments = [x.bfloat16(), x_bias.bfloat16(), *others]
    assert op(impl, p)(*arguments).dtype == torch.float32
    compare(guards, op(impl, p), formula(p), arguments, tolerance=1.6e-2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 40), (3, 0, 8)])
def test_add_layer_norm(guards: Guards, impl: str, shape: tuple[int, ...]) -> None:
    def run(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.stack(functional.add_layer_norm(x, residual, weight - 1, bias, zero_centred=True, impl=impl))

    x, _, *others = inputs(*shape)
    compare(guards, run, lambda x, *rest: formula(0.0)(x, None, *rest), [x, *others], tolerance=1e-5)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("p", [0.0, P])
def test_one_result_alone(guards: Guards, which: int, p: float) -> None:
    """Nothing comes back along the residual behind the last layer, and nothing through a norm that is not used."""
    for run, exact in ((op("triton", p), formula(p)),):
        compare(guards, lambda *t, run=run: run(*t)[which], lambda *t, exact=exact: exact(*t)[which],
                inputs(4, 3, 40), tolerance=1e-5)  # fmt: skip


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_layouts(guards: Guards, layout: str) -> None:
    x, x_bias, residual, *others = inputs(6, 3, 40)
    assert x is not None and residual is not None
    arguments = [layouts(x)[layout], x_bias, layouts(residual)[layout], *others]
    upstream = layouts(torch.randn(2, 6, 3, 40))[layout]
    compare(guards, op("triton"), formula(), arguments, upstream=upstream, tolerance=1e-5)
    compare(guards, op("triton"), formula(), arguments, upstream=torch.ones(()).expand(2, 6, 3, 40), tolerance=1e-5)


def test_is_the_composition(guards: Guards) -> None:
    """The same bits: what backward makes again with a norm alone is what this made."""
    arguments = inputs(4, 3, 64)
    x, x_bias, residual, weight, bias = arguments
    total, y = op("triton")(*arguments)
    mask = MASK | {"p": P, "sample_numbers": SAMPLES, "impl": "triton"}
    assert x is not None and weight is not None and bias is not None
    composed = functional.bias_dropout_add(x, x_bias, residual, **mask)
    assert torch.equal(total, composed)
    assert torch.equal(y, functional.layer_norm(composed, weight, bias, impl="triton"))


def test_no_dropout_in_evaluation(guards: Guards) -> None:
    arguments = inputs(4, 3, 8)
    given = {"training": False, "sample_numbers": None}
    assert torch.equal(op("triton", **given)(*arguments), op("triton", 0.0)(*arguments))
    with pytest.raises(ValueError, match="sample_numbers"):
        op("triton", sample_numbers=None)(*arguments)
