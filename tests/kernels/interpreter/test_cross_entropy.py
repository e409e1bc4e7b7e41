from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, close, compare, layouts
from trimegatron.kernels import functional, launcher


def op(impl: str, **given: Any):
    return lambda logits, target: functional.cross_entropy(logits, target, impl=impl, **given)


def formula(num_valid: int, label_smoothing: float = 0.0):
    """Over the words alone, with the labels written out as a distribution; -100 is ignored."""

    def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        ignored = target == -100
        words = logits[..., :num_valid]
        log_probability = words - words.logsumexp(-1, keepdim=True)
        hot = torch.nn.functional.one_hot(target.masked_fill(ignored, 0), num_valid).double()
        label = (1 - label_smoothing) * hot
        if label_smoothing:
            label = label + label_smoothing / (num_valid - 1) * (1 - hot)
        return torch.where(ignored, 0.0, -(label * log_probability).sum(-1))

    return cross_entropy


def inputs(rows: tuple[int, ...], columns: int, num_valid: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    target = torch.randint(num_valid, rows)
    target.view(-1)[0], target.view(-1)[-1] = num_valid - 1, 0
    return [(torch.randn(*rows, columns) * 4).to(dtype), target]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row without long rows, which are slow here."""
    monkeypatch.setattr(launcher, "configure", lambda op, heuristic, x, **shape: launcher.Config(4, 64, 4, 2))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("columns", [1, 5, 1000, 1001, 5003])
def test_values_and_gradients(guards: Guards, impl: str, columns: int) -> None:
    """Rows that start on 16 bytes and rows that do not; several rows a program and several blocks a row."""
    compare(guards, op(impl), formula(columns), inputs((3,), columns, columns), tolerance=4e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("columns", [5, 136, 131])
def test_half_precision(guards: Guards, small_tiles: None, impl: str, dtype: torch.dtype, columns: int) -> None:
    compare(guards, op(impl), formula(columns), inputs((3, 2), columns, columns, dtype))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("columns,num_valid", [(64, 50), (67, 50), (131, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_and_smoothing(
    guards: Guards, small_tiles: None, impl: str, columns: int, num_valid: int, smoothing: float
) -> None:
    """What stands in the padding is never counted, not even NaN; ignored rows have no gradient, whatever they hold."""
    logits, target = inputs((2, 3), columns, num_valid)
    target[1, 1] = -100
    compare(guards, op(impl, num_valid=num_valid, label_smoothing=smoothing), formula(num_valid, smoothing),
            [logits, target], tolerance=4e-6)  # fmt: skip
    logits[..., num_valid:] = float("nan")
    logits[1, 1] = float("nan")
    placed = guards.put(logits).requires_grad_()
    op(impl, num_valid=num_valid, label_smoothing=smoothing)(placed, target).sum().backward()
    assert placed.grad is not None and placed.grad.isfinite().all()
    assert placed.grad[..., num_valid:].abs().sum() == 0 and placed.grad[1, 1].abs().sum() == 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("columns", [24, 33])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cut_by_columns(guards: Guards, impl: str, columns: int, smoothing: float) -> None:
    """Equal to the whole; the last cut is all padding."""
    size = 4
    logits, target = inputs((7,), columns, columns)
    target[3] = -100
    width = -(-columns // (size - 1))
    padded = torch.full((7, width * size), 60.0)
    padded[:, :columns] = logits
    cuts = [guards.put(cut).requires_grad_() for cut in padded.split(width, dim=-1)]
    words = [max(0, min(width, columns - rank * width)) for rank in range(size)]
    everyone: list[Tensor] = []

    def combine(local: Tensor) -> Tensor:
        """All ranks' on the second call; the first ones only hand in theirs."""
        everyone.append(local.clone())
        return torch.stack(together(everyone)) if len(everyone) > size else local

    def together(parts: list[Tensor]) -> list[Tensor]:
        maxima, sums, targets, *rest = torch.stack(parts[:size], dim=1)
        maximum = maxima.amax(0)
        total = (sums * (maxima - maximum).exp()).sum(0)
        return [maximum, total, targets.amax(0), *(part.sum(0) for part in rest)]

    given = [{"vocab_start": rank * width, "num_valid": words[rank], "vocab_size": columns, "combine": combine,
              "label_smoothing": smoothing} for rank in range(size)]  # fmt: skip
    for rank in range(size):
        op(impl, **given[rank])(cuts[rank].detach(), target)
    whole = logits.double().requires_grad_()
    expected = formula(columns, smoothing)(whole, target)
    upstream = torch.randn(7)
    expected.backward(upstream.double())
    assert whole.grad is not None
    for rank in range(size):
        loss = op(impl, **given[rank])(cuts[rank], target)
        loss.backward(upstream)
        close(loss.detach(), expected.detach(), 4e-6, f"loss of rank {rank}")
    gradient = torch.cat([cut.grad for cut in cuts if cut.grad is not None], dim=-1)
    close(gradient[:, :columns], whole.grad, 4e-6, "gradient")
    assert gradient[:, columns:].abs().sum() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [136, 131])
def test_gradient_made_with_the_loss(guards: Guards, small_tiles: None, dtype: torch.dtype, columns: int) -> None:
    """The promised gradient; another one in some rows; and none promised: the same bits."""
    logits, target = inputs((5, 1), columns, columns - 3, dtype)
    target[2] = -100
    promised = torch.tensor([0.5, -2.0, 1.0, 0.0, 3.0]).view(5, 1)
    for received in (promised, promised * torch.tensor([1.0, 1.0, 2.0, 1.0, -1.0]).view(5, 1), promised + 1):
        grads = []
        for upstream in (None, promised):
            placed = guards.put(logits).requires_grad_()
            loss = op("triton", num_valid=columns - 3, upstream=upstream, label_smoothing=0.1)(placed, target)
            loss.backward(received)
            grads.append(placed.grad)
        assert torch.equal(*grads)
    compare(guards, op("triton", upstream=promised), formula(columns), [logits, target], upstream=promised,
            tolerance=4e-6 if dtype == torch.float32 else None)  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_in_place_is_the_same_in_the_logits_memory(guards: Guards, impl: str, dtype: torch.dtype) -> None:
    logits, target = inputs((5,), 37, 30, dtype)
    grads = []
    for in_place in (False, True):
        leaf = guards.put(logits).requires_grad_()
        placed = leaf * 1
        seen: list[int] = []
        placed.register_hook(lambda grad, seen=seen: seen.append(grad.data_ptr()))
        op(impl, num_valid=30, in_place=in_place)(placed, target).backward(torch.arange(5.0))
        assert (placed.data_ptr() == seen[0]) is in_place
        grads.append(leaf.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("given", [{"in_place": True}, {"upstream": torch.ones(5)}])
def test_a_buffer_handed_over_is_not_used_again(guards: Guards, given: dict[str, Any]) -> None:
    """Neither by another reader of the logits nor by a second backward pass: an error, not a wrong number."""
    logits, target = inputs((5,), 16, 16)
    placed = logits.requires_grad_() * 1
    other = placed.square().sum()
    loss = op("triton", **given)(placed, target).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    if "in_place" in given:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()


@pytest.mark.parametrize("impl", IMPLS)
def test_largest_fp16_logits(guards: Guards, impl: str) -> None:
    logits = torch.tensor([[6e4, -6e4, 59968.0, 0.0]] * 3).half()
    compare(guards, op(impl), formula(4), [logits, torch.tensor([0, 1, 2])])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("columns", [8, 11])
def test_words_without_probability(guards: Guards, impl: str, columns: int) -> None:
    """-inf logits take none; a target that has none, or is no word, is infinitely unlikely; NaN is not hidden."""
    logits = torch.zeros(4, columns)
    logits[:, 1] = -torch.inf
    logits[3, 2] = torch.nan
    loss = op(impl)(guards.put(logits), torch.tensor([0, 1, columns, 0]))
    assert torch.equal(loss[1:3], torch.full((2,), torch.inf)) and loss[3].isnan()
    torch.testing.assert_close(loss[0], torch.tensor(columns - 1.0).log())


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
@pytest.mark.parametrize("in_place", [False, True])
def test_layouts(guards: Guards, layout: str, in_place: bool) -> None:
    logits, target = inputs((6, 3), 37, 37)
    upstream = layouts(torch.randn(6, 3, 2)[..., 0])[layout]
    run = op("triton", in_place=in_place)
    compare(guards, lambda x, t: run(x * 1, t), formula(37), [layouts(logits)[layout], target], upstream=upstream,
            tolerance=4e-6)  # fmt: skip
    turned = target.t().contiguous().t()
    compare(guards, op("triton"), formula(37), [logits, turned], upstream=torch.ones(()).expand(6, 3), tolerance=4e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows(guards: Guards, impl: str, shape: tuple[int, ...]) -> None:
    logits = torch.empty(shape).requires_grad_()
    for given in ({}, {"in_place": True}, {"upstream": torch.ones(shape[:-1])}):
        loss = op(impl, **given)(logits * 1, torch.empty(shape[:-1], dtype=torch.int64))
        loss.sum().backward()
        assert loss.shape == shape[:-1] and logits.grad is not None and logits.grad.shape == shape


def test_same_bits_every_time(guards: Guards) -> None:
    logits, target = inputs((9,), 301, 301)
    run = functools.partial(op("triton"), logits, target)
    assert torch.equal(run(), run())
