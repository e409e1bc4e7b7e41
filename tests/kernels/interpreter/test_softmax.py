from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, compare, layouts
from trimegatron.kernels import functional, philox

SCALE = 0.7
P = 0.25
SAMPLES = torch.tensor([(5 << 32) + 0x80000001, 3])
MASK_OF = {"p": P, "seed": 0xFFFFFFF0, "layer": 5, "head_offset": 7, "position_offset": 100}


def visible_softmax(scores: Tensor, masked: Tensor) -> Tensor:
    """exp / Σ exp over what is visible; a row without any is 0 / 1."""
    top = scores.detach().amax(dim=-1, keepdim=True)
    weight = torch.exp(SCALE * (scores - top)) * ~masked
    total = weight.sum(dim=-1, keepdim=True)
    return weight / torch.where(total == 0, 1.0, total)


def causal_formula(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    queries, keys = scores.shape[-2:]
    query, key = torch.arange(queries).view(-1, 1), torch.arange(keys)
    later = key > query + keys - queries
    return visible_softmax(scores, later if mask is None else later | mask)


def causal(impl: str):
    return lambda scores: functional.scaled_causal_softmax(scores, SCALE, impl=impl)


def masked(impl: str):
    return lambda scores, mask: functional.scaled_masked_softmax(scores, mask, SCALE, impl=impl)


def masked_formula(scores: Tensor, mask: Tensor | None) -> Tensor:
    return visible_softmax(scores, torch.zeros(scores.shape, dtype=torch.bool) if mask is None else mask)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("queries,keys", [(1, 1), (7, 7), (63, 63), (127, 127), (130, 129), (5, 2049), (3, 4097)])
def test_causal(guards: Guards, impl: str, queries: int, keys: int) -> None:
    """(130, 129) has a query that sees no key."""
    compare(guards, causal(impl), causal_formula, [torch.randn(2, 1, queries, keys) * 4])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("keys", [1, 7, 63, 127, 129, 2049, 4097])
@pytest.mark.parametrize("batch,heads", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_masked(guards: Guards, impl: str, keys: int, batch: int, heads: int) -> None:
    mask = torch.rand(batch, heads, 3, keys) > 0.5
    mask[0, 0, 1] = True  # a fully masked row
    compare(guards, masked(impl), masked_formula, [torch.randn(2, 3, 3, keys) * 4, mask])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("keys", [1, 33, 17000])
def test_without_mask(guards: Guards, impl: str, keys: int) -> None:
    compare(guards, masked(impl), masked_formula, [torch.randn(1, 3, 2, keys) * 4, None])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", [16385, 20000])
def test_rows_too_long_for_registers(guards: Guards, dtype: torch.dtype, keys: int) -> None:
    scores = (torch.randn(1, 1, 4, keys) * 4).to(dtype)
    compare(guards, causal("triton"), causal_formula, [scores])
    mask = torch.rand(1, 1, 4, keys) > 0.5
    mask[0, 0, 2] = True
    compare(guards, masked("triton"), masked_formula, [scores, mask])


def test_blocks_of_long_rows_without_visible_keys(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looped kernels with blocks of 32: most lie wholly above the diagonal, and one row sees nothing at all."""
    from trimegatron.kernels import launcher, softmax

    monkeypatch.setattr(softmax, "_LONGEST_ROW_IN_REGISTERS", 16)
    monkeypatch.setattr(launcher, "configure", lambda op, heuristic, x, **shape: launcher.Config(1, 32, 4, 2))
    compare(guards, causal("triton"), causal_formula, [torch.randn(1, 1, 70, 69) * 4])
    op, formula = dropped("triton", True), dropped_formula(True)
    compare(guards, op, formula, [torch.randn(1, 1, 40, 39) * 4, torch.rand(1, 1, 40, 39) > 0.7])


def dropped(impl: str, is_causal: bool):
    return lambda scores, mask: functional.softmax_dropout(
        scores, mask, SCALE, causal=is_causal, sample_numbers=SAMPLES[: len(scores)], impl=impl, **MASK_OF
    )


def dropped_formula(is_causal: bool):
    def formula(scores: Tensor, mask: Tensor | None) -> Tensor:
        y = causal_formula(scores, mask) if is_causal else masked_formula(scores, mask)
        keep = philox.attention_keep_mask(scores.shape, SAMPLES[: len(scores)], **MASK_OF)
        return y * keep / (1 - P)

    return formula


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", [None, 1])
@pytest.mark.parametrize("queries,keys", [(1, 1), (20, 17), (3, 300)])
def test_dropout_in_the_same_pass(
    guards: Guards, impl: str, is_causal: bool, heads: int | None, queries: int, keys: int
) -> None:
    """(20, 17) has queries that see no key; ``heads`` None is no mask."""
    mask = None if heads is None else torch.rand(2, heads, queries, keys) > 0.5
    if mask is not None:
        mask[0, 0, 0] = True
    compare(guards, dropped(impl, is_causal), dropped_formula(is_causal), [torch.randn(2, 3, queries, keys) * 4, mask])


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_of_rows_too_long_for_registers(guards: Guards, dtype: torch.dtype) -> None:
    scores = (torch.randn(1, 1, 3, 16400) * 4).to(dtype)
    for is_causal in (True, False):
        mask = torch.rand(1, 1, 3, 16400) > 0.5
        compare(guards, dropped("triton", is_causal), dropped_formula(is_causal), [scores, mask])


def test_dropout_is_that_of_two_passes(guards: Guards) -> None:
    """The same mask as ``attention_dropout``'s, and the result but for one rounding."""
    scores = torch.randn(2, 3, 20, 70)
    fused = dropped("triton", True)(scores, None)
    two = functional.attention_dropout(causal("triton")(scores), sample_numbers=SAMPLES, impl="triton", **MASK_OF)
    assert torch.equal(fused == 0, two == 0)
    torch.testing.assert_close(fused, two, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_dropout_off_is_the_softmax(guards: Guards, impl: str, is_causal: bool) -> None:
    scores, mask = torch.randn(2, 3, 5, 9), torch.rand(2, 1, 5, 9) > 0.5
    for mask_or_none in (mask, None):
        y = functional.softmax_dropout(
            scores, mask_or_none, SCALE, causal=is_causal, sample_numbers=None, training=False, impl=impl, **MASK_OF
        )
        formula = causal_formula if is_causal else masked_formula
        torch.testing.assert_close(y, formula(scores, mask_or_none), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_half_precision(guards: Guards, impl: str, dtype: torch.dtype) -> None:
    compare(guards, causal(impl), causal_formula, [(torch.randn(2, 3, 40, 40) * 4).to(dtype)])


@pytest.mark.parametrize("impl", IMPLS)
def test_largest_fp16_scores(guards: Guards, impl: str) -> None:
    """The scale acts in fp32, so nothing overflows."""
    scores = torch.tensor([6e4, -6e4, 59968.0, 0.0]).half().view(1, 1, 1, 4)
    compare(guards, lambda s: functional.scaled_causal_softmax(s, 8.0, impl=impl),
            lambda s: torch.softmax(8.0 * s, dim=-1), [scores])  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
def test_fully_masked_row_is_zero_with_zero_gradient(guards: Guards, impl: str) -> None:
    scores = torch.randn(1, 1, 2, 5).requires_grad_()
    mask = torch.zeros(1, 1, 2, 5, dtype=torch.bool)
    mask[..., 1, :] = True
    y = masked(impl)(scores, mask)
    y.backward(torch.full(y.shape, 3.0))
    assert torch.equal(y[0, 0, 1], torch.zeros(5)) and torch.equal(scores.grad[0, 0, 1], torch.zeros(5))


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_is_not_hidden(guards: Guards, impl: str) -> None:
    scores = torch.zeros(1, 1, 2, 3)
    scores[0, 0, 1, 0] = float("nan")
    y = causal(impl)(scores)
    assert not y[0, 0, 0].isnan().any() and y[0, 0, 1].isnan().all()


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_layouts(guards: Guards, layout: str) -> None:
    scores = torch.randn(2, 3, 6, 10)
    upstream = layouts(torch.randn(scores.shape))[layout]
    compare(guards, causal("triton"), causal_formula, [layouts(scores)[layout]], upstream=upstream)
    mask = torch.rand(2, 3, 10, 6).transpose(-1, -2) > 0.5
    compare(guards, masked("triton"), masked_formula, [scores, mask], upstream=upstream)
    compare(guards, masked("triton"), masked_formula, [scores, mask[..., :1]], upstream=upstream)
    compare(guards, dropped("triton", True), dropped_formula(True), [layouts(scores)[layout], mask], upstream=upstream)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_do(guards: Guards, impl: str, shape: tuple[int, ...]) -> None:
    scores = torch.empty(shape).requires_grad_()
    (causal(impl)(scores).sum() + dropped(impl, True)(scores, None).sum()).backward()
    assert scores.grad is not None and scores.grad.shape == shape
