from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, close, compare, layouts
from trimegatron.kernels import functional


def formula(approximate: str):
    def gelu(x: Tensor, bias: Tensor) -> Tensor:
        z = x + bias
        if approximate == "tanh":
            return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        return 0.5 * z * (1 + torch.erf(z / math.sqrt(2)))

    return gelu


def op(approximate: str, impl: str):
    return lambda x, bias: functional.bias_gelu(x, bias, approximate, impl=impl)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    return [(torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("hidden", [1, 5, 255, 1000, 1001])
def test_values_and_gradients(guards: Guards, impl: str, approximate: str, hidden: int) -> None:
    compare(guards, op(approximate, impl), formula(approximate), inputs(37, hidden))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(guards: Guards, impl: str, approximate: str, dtype: torch.dtype) -> None:
    compare(guards, op(approximate, impl), formula(approximate), inputs(9, 70, dtype=dtype))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_far_from_zero(guards: Guards, approximate: str) -> None:
    """No overflow in exp or in z cubed: gelu is z on the right, 0 on the left."""
    x = torch.tensor([[-1e4, -50.0, -10.0, 0.0, 10.0, 50.0, 1e4]])
    compare(guards, op(approximate, "triton"), formula(approximate), [x, torch.zeros(7)])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", [(5, 3, 40), (0, 8)])
def test_backward_that_emits_the_activation(
    guards: Guards, impl: str, approximate: str, shape: tuple[int, ...]
) -> None:
    x, bias, dy = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    exact = [t.double().requires_grad_() for t in (x, bias)]
    y = formula(approximate)(*exact)
    y.backward(dy.double())
    results = functional.bias_gelu_backward_with_activation(guards.put(dy), guards.put(x), bias, approximate, impl=impl)
    for actual, expected in zip(results, (exact[0].grad, exact[1].grad, y.detach()), strict=True):
        assert expected is not None
        close(actual, expected, 4e-6, "result")


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_layouts(guards: Guards, layout: str) -> None:
    x, bias = inputs(6, 4, 40)
    assert x is not None
    upstream = layouts(torch.randn(x.shape))[layout]
    compare(guards, op("tanh", "triton"), formula("tanh"), [layouts(x)[layout], bias], upstream=upstream)


def test_many_rows_in_one_program(guards: Guards) -> None:
    """More tiles of rows than programs: each walks several, and the partial sums of all are added."""
    compare(guards, op("tanh", "triton"), formula("tanh"), inputs(600, 200))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(guards: Guards, impl: str) -> None:
    x, bias = torch.empty(0, 8).requires_grad_(), torch.randn(8).requires_grad_()
    op("tanh", impl)(x, bias).sum().backward()
    assert x.grad is not None and torch.equal(bias.grad, torch.zeros(8))
