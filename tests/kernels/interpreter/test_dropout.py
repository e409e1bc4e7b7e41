"""Bias-dropout-add and attention dropout: values, gradients, and masks that do not depend on how the work is cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, compare, layouts
from trimegatron.kernels import functional, philox

P = 0.1
SEED = 0xFFFFFFF0  # above 2**31
SAMPLES = torch.tensor([7, (5 << 32) + 0x80000001, 3])  # one with a high word
HIDDEN_MASK = {"p": P, "seed": SEED, "site": functional.Site.MLP_OUTPUT, "layer": 16383}
ATTENTION_MASK = {"p": P, "seed": SEED, "layer": 5}


def op(impl: str, samples: Tensor, **mask: float):
    return lambda x, bias, residual: functional.bias_dropout_add(
        x, bias, residual, sample_numbers=samples, impl=impl, **(HIDDEN_MASK | mask)
    )


def formula(samples: Tensor, **mask: float):
    arguments = HIDDEN_MASK | mask

    def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        value = x if bias is None else x + bias
        if arguments["p"]:
            keep = philox.hidden_keep_mask(x.shape, samples, **arguments)
            value = value * keep * (65536 / (65536 - round(65536 * arguments["p"])))
        return value if residual is None else value + residual

    return bias_dropout_add


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    return [torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype), torch.randn(shape).to(dtype)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("hidden", [1, 5, 255, 1000, 1001])
@pytest.mark.parametrize("p", [0.0, P])
def test_values_and_gradients(guards: Guards, impl: str, hidden: int, p: float) -> None:
    compare(guards, op(impl, SAMPLES, p=p), formula(SAMPLES, p=p), inputs(11, 3, hidden))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("given", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_without_bias_or_residual(guards: Guards, impl: str, given: tuple[bool, bool], p: float) -> None:
    x, bias, residual = inputs(4, 3, 40)
    arguments = [x, bias if given[0] else None, residual if given[1] else None]
    compare(guards, op(impl, SAMPLES, p=p), formula(SAMPLES, p=p), arguments)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("p", [0.0, P])
def test_half_precision(guards: Guards, impl: str, dtype: torch.dtype, p: float) -> None:
    compare(guards, op(impl, SAMPLES, p=p), formula(SAMPLES, p=p), inputs(8, 3, 70, dtype=dtype))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("p", [0.0, P])
def test_fp32_residual_of_bf16_activations(guards: Guards, impl: str, p: float) -> None:
    x, bias, residual = inputs(4, 3, 40)
    assert x is not None and bias is not None
    arguments = [x.bfloat16(), bias.bfloat16(), residual]
    compare(guards, op(impl, SAMPLES, p=p), formula(SAMPLES, p=p), arguments)
    assert op(impl, SAMPLES, p=p)(*arguments).dtype == torch.float32


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_layouts(guards: Guards, layout: str) -> None:
    x, bias, residual = inputs(6, 3, 40)
    assert x is not None
    upstream = layouts(torch.randn(x.shape))[layout]
    arguments = [layouts(x)[layout], bias, residual]
    compare(guards, op("triton", SAMPLES), formula(SAMPLES), arguments, upstream=upstream)


@pytest.mark.parametrize("training", [True, False])
def test_sample_numbers_are_needed_only_to_drop(guards: Guards, training: bool) -> None:
    x, bias, residual = inputs(4, 3, 8)
    mask = HIDDEN_MASK | {"sample_numbers": None, "training": training, "impl": "triton"}
    if training:
        with pytest.raises(ValueError, match="sample_numbers"):
            functional.bias_dropout_add(x, bias, residual, **mask)
    else:
        close = torch.testing.assert_close
        close(functional.bias_dropout_add(x, bias, residual, **mask), x + bias + residual)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(guards: Guards, impl: str) -> None:
    x, bias = torch.empty(0, 3, 8).requires_grad_(), torch.randn(8).requires_grad_()
    op(impl, SAMPLES)(x, bias, None).sum().backward()
    assert x.grad is not None and torch.equal(bias.grad, torch.zeros(8))


@pytest.mark.parametrize("hidden", [5, 64, 1001])
def test_hidden_mask_is_the_eager_one(guards: Guards, hidden: int) -> None:
    kept = op("triton", SAMPLES, position_offset=1000)(torch.ones(19, 3, hidden), None, None) != 0
    assert torch.equal(kept, philox.hidden_keep_mask((19, 3, hidden), SAMPLES, position_offset=1000, **HIDDEN_MASK))


def test_hidden_mask_does_not_depend_on_the_cut(guards: Guards) -> None:
    whole = op("triton", SAMPLES)(torch.ones(12, 3, 72), None, None)
    for first, last in ((0, 5), (5, 12)):  # sequence parallel
        ones = torch.ones(last - first, 3, 72)
        assert torch.equal(op("triton", SAMPLES, position_offset=first)(ones, None, None), whole[first:last])
    for sample in range(3):  # micro-batches and data parallel
        part = op("triton", SAMPLES[sample : sample + 1])(torch.ones(12, 1, 72), None, None)
        assert torch.equal(part, whole[:, sample : sample + 1])


def attention(impl: str, samples: Tensor, **mask: float):
    return lambda x: functional.attention_dropout(x, sample_numbers=samples, impl=impl, **(ATTENTION_MASK | mask))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [1, 7, 63, 127, 300])
def test_attention_dropout(guards: Guards, impl: str, dtype: torch.dtype, keys: int) -> None:
    x = torch.rand(3, 2, 5, keys).to(dtype)
    keep = philox.attention_keep_mask(x.shape, SAMPLES, **ATTENTION_MASK)
    scale = 65536 / (65536 - round(65536 * P))
    compare(guards, attention(impl, SAMPLES), lambda t: t * keep * scale, [x])


def test_attention_mask_is_the_eager_one_and_does_not_depend_on_the_cut(guards: Guards) -> None:
    shape = (3, 4, 9, 130)
    whole = attention("triton", SAMPLES, head_offset=8, position_offset=100)(torch.ones(shape))
    eager = philox.attention_keep_mask(shape, SAMPLES, head_offset=8, position_offset=100, **ATTENTION_MASK)
    assert torch.equal(whole != 0, eager)
    for head in range(4):  # tensor parallel
        part = attention("triton", SAMPLES, head_offset=8 + head, position_offset=100)(torch.ones(3, 1, 9, 130))
        assert torch.equal(part, whole[:, head : head + 1])
    part = attention("triton", SAMPLES[1:2], head_offset=8, position_offset=104)(torch.ones(1, 4, 5, 130))
    assert torch.equal(part, whole[1:2, :, 4:])
    longer = attention("triton", SAMPLES, head_offset=8, position_offset=100)(torch.ones(3, 4, 9, 257))
    assert torch.equal(longer[..., :130], whole)


@pytest.mark.parametrize("impl", IMPLS)
def test_attention_dropout_off_is_the_identity(guards: Guards, impl: str) -> None:
    x = torch.rand(1, 1, 2, 3)
    assert attention(impl, SAMPLES[:1], p=0.0)(x) is x
    assert attention(impl, SAMPLES[:1], training=False)(x) is x
    assert attention(impl, SAMPLES)(torch.rand(3, 0, 2, 3)).shape == (3, 0, 2, 3)
