"""Flash attention: values and every gradient against the formula, and the masks of the other backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.guards import Guards
from tests.kernels.interpreter.compare import DTYPES, IMPLS, close, compare, layouts
from trimegatron.kernels import functional, launcher, philox

SCALE = 0.3
SAMPLES = torch.tensor([7, (5 << 32) + 0x80000001])  # one with a high word
MASK = {"p": 0.2, "seed": 0xFFFFFFF0, "layer": 5, "head_offset": 6}
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def starts(s: int, *lengths: int) -> Tensor:
    """Documents of these lengths, then one to the end: a row [s] each of the two samples, the second shifted by one."""
    rows = []
    for shift in (0, 1):
        row, start = torch.zeros(s, dtype=torch.int64), 0
        for length in lengths:
            start += length + shift
            row[start:] = start
        rows.append(row)
    return torch.stack(rows)


def op(impl: str, documents: Tensor | None = None, **mask: Any):
    arguments = MASK | {"sample_numbers": SAMPLES, "scale": SCALE, "document_starts": documents, "impl": impl} | mask
    return lambda q, k, v: functional.flash_attention(q, k, v, **arguments)


def formula(documents: Tensor | None = None, **mask: Any):
    arguments = MASK | mask

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, position = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
        k, v = (torch.stack([x[:, head // group] for head in range(q.shape[1])], dim=1) for x in (k, v))
        hidden = (position > position[:, None])[None, None]
        if documents is not None:
            hidden = hidden | (position < documents[:, None, :, None])
        scores = (q @ k.transpose(-1, -2) * SCALE).masked_fill(hidden, float("-inf"))
        weights = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
        keep = philox.attention_keep_mask(weights.shape, SAMPLES, **arguments)
        return weights * keep * (65536 / (65536 - round(65536 * arguments["p"]))) @ v

    return attention


def inputs(s: int, d: int, n: int = 2, n_kv: int = 2, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    return [torch.randn(2, heads, s, d).to(dtype) for heads in (n, n_kv, n_kv)]


def check(
    guards: Guards, impl: str, tensors: list[Tensor | None], documents: Tensor | None = None, **mask: Any
) -> None:
    assert tensors[0] is not None
    limit = TOLERANCE[tensors[0].dtype]
    compare(guards, op(impl, documents, **mask), formula(documents, **mask), tensors, tolerance=limit)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("s,d", [(1, 32), (7, 40), (33, 72), (64, 64), (65, 96), (40, 80), (31, 128), (5, 33)])
def test_sizes(guards: Guards, impl: str, s: int, d: int) -> None:
    check(guards, impl, inputs(s, d, n=1, n_kv=1), p=0.2)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("lengths", [(), (1, 9, 42), (66,)])
def test_documents(guards: Guards, impl: str, p: float, lengths: tuple[int, ...]) -> None:
    check(guards, impl, inputs(70, 16, n=1, n_kv=1), starts(70, *lengths), p=p)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("n,n_kv", [(4, 2), (2, 1)])
def test_heads_that_share_keys(guards: Guards, impl: str, n: int, n_kv: int) -> None:
    check(guards, impl, inputs(33, 16, n=n, n_kv=n_kv), starts(33, 20))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("d", [64, 72])
def test_half_precision(guards: Guards, impl: str, dtype: torch.dtype, d: int) -> None:
    """With the tiles of half precision."""
    check(guards, impl, inputs(140, d, n=1, n_kv=1, dtype=dtype), starts(140, 70) if d == 64 else None)


@pytest.mark.parametrize(
    "rows,columns,documents", [(16, 32, True), (64, 32, True), (32, 64, False), (64, 64, False), (16, 128, True)]
)
def test_tiles(guards: Guards, rows: int, columns: int, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of any shape, and a last one that is not full."""
    monkeypatch.setattr(launcher, "configure", lambda op, heuristic, x, **shape: launcher.Config(rows, columns, 4))
    check(guards, "triton", inputs(75, 16, n=1, n_kv=1), starts(75, 20, 5, 30) if documents else None)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
def test_layouts(guards: Guards, layout: str) -> None:
    tensors = inputs(20, 16)
    upstream = layouts(torch.randn(2, 2, 20, 16))[layout]
    arguments = [layouts(x)[layout] for x in tensors if x is not None]
    compare(guards, op("triton"), formula(), arguments, upstream=upstream, tolerance=5e-6)


def test_views_of_a_projection(guards: Guards) -> None:
    """q, k, v as the model has them, an expanded incoming gradient, and an output that is [s, b, n d] uncopied."""
    s, b, n, d = 33, 2, 2, 24
    grads, outputs = [], []
    for function in (op("triton"), formula()):
        torch.manual_seed(5)
        projection = torch.randn(s, b, n, 3, d).requires_grad_()
        q, k, v = (part.permute(1, 2, 0, 3) for part in projection.unbind(dim=3))
        out = function(q, k, v)
        out.sum().backward()
        grads.append(projection.grad)
        outputs.append(out.detach())
    close(outputs[0], outputs[1].double(), 5e-6, "result")
    close(grads[0], grads[1].double(), 5e-6, "gradient")
    assert outputs[0].permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_mask_is_that_of_attention_dropout(guards: Guards, impl: str) -> None:
    """A value matrix that is a window of the identity shows the dropped probabilities themselves."""
    s, d = 100, 64
    q, k = torch.randn(2, 2, 1, s, d).unbind()
    expected = functional.attention_dropout(
        functional.scaled_causal_softmax(q @ k.mT, SCALE, impl=impl), sample_numbers=SAMPLES, impl=impl, **MASK
    )
    keep = philox.attention_keep_mask((2, 1, s, s), SAMPLES, **MASK).tril()
    for first in (0, s - d):
        window = torch.eye(s)[:, first : first + d].expand(2, 1, s, d)
        shown = op(impl)(q, k, window)
        part = slice(first, first + d)
        assert torch.equal(shown != 0, keep[..., part])
        torch.testing.assert_close(shown, expected[..., part], rtol=1e-4, atol=1e-7)


def test_the_mask_does_not_depend_on_the_cut(guards: Guards) -> None:
    q, k, v = (torch.randn(2, 2, 40, 16) for _ in range(3))
    whole = op("triton")(q, k, v)
    for head in (0, 1):  # tensor parallel
        one = slice(head, head + 1)
        part = op("triton", head_offset=MASK["head_offset"] + head)(*(x[:, one] for x in (q, k, v)))
        assert torch.equal(part, whole[:, one])
    for sample in (0, 1):  # micro-batches and data parallel
        one = slice(sample, sample + 1)
        assert torch.equal(op("triton", sample_numbers=SAMPLES[one])(*(x[one] for x in (q, k, v))), whole[one])


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_tiles_outside_a_document_are_not_read(guards: Guards) -> None:
    """NaN in the first document reaches nothing of the second, which begins with a tile, nor the other way round."""
    documents = torch.zeros(1, 128, dtype=torch.int64)
    documents[:, 64:] = 64
    for poisoned in (slice(0, 64), slice(64, 128)):
        tensors = [torch.randn(1, 1, 128, 16) for _ in range(3)]
        for x in tensors:
            x[..., poisoned, :] = float("nan")
        leaves = [x.requires_grad_() for x in tensors]
        out = op("triton", documents, sample_numbers=SAMPLES[:1])(*leaves)
        out.sum().backward()
        for x in (out, *(leaf.grad for leaf in leaves)):
            nan = x.detach().isnan().any(dim=-1)[0, 0]
            assert bool(nan[poisoned].all()) and int(nan.sum()) == 64


@pytest.mark.parametrize("impl", IMPLS)
def test_nan_is_not_hidden(guards: Guards, impl: str) -> None:
    q, k, v = (torch.randn(1, 1, 3, 8) for _ in range(3))
    q[0, 0, 1, 0] = float("nan")
    out = op(impl, sample_numbers=SAMPLES[:1])(q, k, v)
    assert out[0, 0, 1].isnan().all() and not out[0, 0, ::2].isnan().any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("b,n,s", [(0, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_nothing_to_do(guards: Guards, impl: str, b: int, n: int, s: int) -> None:
    leaves = [torch.empty(b, n, s, 16).requires_grad_() for _ in range(3)]
    op(impl, sample_numbers=SAMPLES[:b])(*leaves).sum().backward()
    assert all(x.grad is not None and x.grad.shape == (b, n, s, 16) for x in leaves)


def test_rows_two_thousand_million_elements_away() -> None:
    """The buffers are reserved, not filled: only the rows are touched. Offsets of 32 bits would read elsewhere."""
    base = torch.randn(3, 2, 1, 4, 16)
    far = []
    for x in base:
        wide = torch.empty((1 << 30) * 3 + (1 << 29) + 16, dtype=torch.float16)
        view = wide.as_strided((2, 1, 4, 16), (1 << 29, 1, 1 << 30, 1))
        far.append(view.copy_(x).requires_grad_())
    near = [x.detach().clone().requires_grad_() for x in far]
    results = []
    for leaves in (far, near):
        out = op("triton")(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
