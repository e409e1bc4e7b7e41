"""Causal attention in Triton without a matrix of scores: o = dropout(softmax(scale · q kᵀ)) v for each head.

Query i sees the keys document_starts[i] … i (0 … i without documents). A program holds a tile of queries and walks
over the keys they see with a running maximum and sum, in fp32; tiles before the earliest start are not read. What is
kept for backward is o and lse = log Σ exp(scale · q kᵀ), fp32 [b, n, s]. The dropout mask is ``attention_dropout``'s
(``philox.py``), made where it is used: in the accumulator's layout a thread's draws are those of its own scores.

Products of half precision are summed in fp32; fp32 inputs are multiplied in IEEE fp32, on the ordinary units, which is
slow: for tests. Head sizes up to 128 are filled up to a power of two by masking. Inputs may have any strides; where the
last one is not 1 they are copied. The backward kernels are in ``flash_attention_backward.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher, philox
from trimegatron.kernels.launcher import Config
from trimegatron.kernels.philox_triton import tile_keep

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_LOWEST = tl.constexpr(-3.0e38)  # finite: the difference of two of them is a number


@triton.jit
def load_rows(
    base, row, stride, rows, D: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    CHECKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows [R] of a matrix with ``rows`` rows of D elements, ``stride`` units of UNIT apart: [R, WIDTH], 0 outside.

    ``CHECKED`` says that a row may lie outside. A stride known to be a multiple of UNIT = 8 lets 16 bytes move at a
    time where it is not a multiple of 16, the only one Triton looks for.
    """
    column = tl.arange(0, WIDTH)
    pointers = base + (tl.cast(row, tl.int64)[:, None] * (tl.cast(stride, tl.int64) * UNIT) + column[None, :])
    if CHECKED and WIDTH != D:
        tile = tl.load(pointers, mask=(row < rows)[:, None] & (column < D)[None, :], other=0.0)
    elif CHECKED:
        tile = tl.load(pointers, mask=(row < rows)[:, None], other=0.0)
    elif WIDTH != D:
        tile = tl.load(pointers, mask=(column < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def store_rows(base, row, stride, rows, tile, D: tl.constexpr, WIDTH: tl.constexpr):
    """The counterpart of ``load_rows``, ``stride`` in elements."""
    column = tl.arange(0, WIDTH)
    pointers = base + (tl.cast(row, tl.int64)[:, None] * tl.cast(stride, tl.int64) + column[None, :])
    mask = (row < rows)[:, None] & (column < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def head_start(base, batch, head, stride_b, stride_n, UNIT: tl.constexpr):
    """Pointer to row 0 of a head, for strides in units of UNIT."""
    return base + (tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_n) * UNIT


@triton.jit
def hide(scores, query, key, first, DIAGONAL: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Scores [M, N] with −∞ where query [M] does not see key [N]; ``first`` [M] is the first key of its document."""
    if DIAGONAL:
        scores = tl.where(key[None, :] <= query[:, None], scores, float("-inf"))
    if DOCUMENTS:
        scores = tl.where(key[None, :] >= first[:, None], scores, float("-inf"))
    return scores


@triton.jit
def _forward_tile(
    q, k, v, query, first, start, stride_k, stride_v, s, c, highest, total, acc, sample, seed, stream, threshold, zero,
    DIAGONAL: tl.constexpr, DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One tile of keys: (highest, total, acc) with them."""
    key = start + tl.arange(0, N)
    k_tile = load_rows(k, key, stride_k, s, D, WIDTH, UNIT, DIAGONAL, UPCAST)
    scores = hide(tl.dot(q, tl.trans(k_tile), input_precision="ieee"), query, key, first, DIAGONAL, DOCUMENTS)
    higher = tl.maximum(highest, tl.max(scores, axis=1))
    weight = tl.exp2(scores * c - (higher * c)[:, None])
    shrink = tl.exp2((highest - higher) * c)
    total = total * shrink + tl.sum(weight, axis=1)
    if DROPS:
        weight = tl.where(tile_keep(query, start, sample, seed, stream, threshold, M, N), weight, zero)
    v_tile = load_rows(v, key, stride_v, s, D, WIDTH, UNIT, DIAGONAL, UPCAST)
    acc = tl.dot(weight.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return higher, total, acc


@triton.jit(do_not_specialize=["seed", "stream", "threshold"])
def _forward_kernel(
    q, k, v, out, lse, sample_numbers, document_starts, heads, group, s,
    q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n, v_s,
    scale, seed, stream, threshold, dropout_scale, zero,
    DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # q, k, v [b, n, s, D] by strides; out [s, b, n, D]; lse [b, n, s]; sample_numbers [b]; document_starts [b, s];
    # stream: the word of head 0. ``zero`` is 0: as a constant it would be selected after the rounding to half
    # precision, an element at a time, and cost two instructions more.
    blocks = tl.cdiv(s, M)
    block = blocks - 1 - tl.program_id(0) % blocks  # the longest first
    batch, head = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    stream += head
    q = head_start(q, batch, head, q_b, q_n, UNIT)
    k = head_start(k, batch, head // group, k_b, k_n, UNIT)
    v = head_start(v, batch, head // group, v_b, v_n, UNIT)
    query = block * M + tl.arange(0, M)
    q_tile = load_rows(q, query, q_s, s, D, WIDTH, UNIT, True, UPCAST)
    sample = tl.load(sample_numbers + batch) if DROPS else 0
    first = query
    begin = 0
    if DOCUMENTS:
        first = tl.load(document_starts + tl.cast(batch, tl.int64) * s + query, mask=query < s, other=s).to(tl.int32)
        begin = tl.min(first, axis=0) // N * N
    diagonal = block * M // N * N
    highest = tl.full([M], _LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    c = scale * _LOG2_E
    for start in tl.range(begin, diagonal, N):
        highest, total, acc = _forward_tile(
            q_tile, k, v, query, first, start, k_s, v_s, s, c, highest, total, acc, sample, seed, stream, threshold,
            zero, False, DROPS, DOCUMENTS, UNIT, UPCAST, D, WIDTH, M, N,
        )  # fmt: skip
    for start in tl.range(tl.maximum(begin, diagonal), tl.minimum(block * M + M, s), N):
        highest, total, acc = _forward_tile(
            q_tile, k, v, query, first, start, k_s, v_s, s, c, highest, total, acc, sample, seed, stream, threshold,
            zero, True, DROPS, DOCUMENTS, UNIT, UPCAST, D, WIDTH, M, N,
        )  # fmt: skip
    total = tl.where(query < s, total, 1.0)
    acc = acc * (dropout_scale / total)[:, None]
    batches = tl.num_programs(0) // blocks // heads
    row_out = out + (tl.cast(batch, tl.int64) * heads + head) * D
    store_rows(row_out, query, tl.cast(batches, tl.int64) * heads * D, s, acc, D, WIDTH)
    row_lse = (tl.cast(batch, tl.int64) * heads + head) * s + query
    tl.store(lse + row_lse, highest * scale + tl.log2(total) * _LN_2, mask=query < s)


def width(head_size: int) -> int:
    """Columns of a tile of heads."""
    return max(16, launcher.power_of_two(head_size))


def flags(q: Tensor, sample_numbers: Tensor | None, document_starts: Tensor | None, unit: int) -> dict[str, object]:
    """What the kernels are compiled for, tiles apart. Triton's interpreter multiplies bf16 wrongly: there it is taken
    to fp32 first."""
    return {
        "DROPS": sample_numbers is not None,
        "DOCUMENTS": document_starts is not None,
        "UNIT": unit,
        "UPCAST": q.dtype == torch.bfloat16 and q.device.type == "cpu",
        "D": q.shape[-1],
        "WIDTH": width(q.shape[-1]),
    }


def dense_rows(*tensors: Tensor) -> tuple[list[Tensor], int]:
    """The tensors with elements of a row side by side, and the unit their strides are given in (see ``load_rows``)."""
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    eights = all(stride % 8 == 0 for x in dense for stride in x.stride()[:3])
    return dense, 8 if eights else 1


def strides(x: Tensor, unit: int) -> tuple[int, ...]:
    """Of batch, head and position."""
    return tuple(stride // unit for stride in x.stride()[:3])


def mask_words(p: float, seed: int, layer: int, head_offset: int, heads: int) -> tuple[int | float, ...]:
    """seed, stream of head 0, threshold, scale, and the zero the kernels select."""
    philox.stream(philox.Site.ATTENTION, layer, head_offset + heads - 1)  # the last head must fit too
    stream = philox.stream(philox.Site.ATTENTION, layer, head_offset)
    words = launcher.signed_word(seed), launcher.signed_word(stream), philox.dropout_threshold(p)
    return *words, philox.dropout_scale(p), 0.0


def empty_heads(q: Tensor, heads: int) -> Tensor:
    """[b, heads, s, d] of q's dtype, laid out as [s, b, heads, d]."""
    b, _, s, d = q.shape
    return torch.empty(s, b, heads, d, dtype=q.dtype, device=q.device).permute(1, 2, 0, 3)


def _config(q: Tensor, drops: bool, documents: bool) -> Config:
    """The largest tiles that neither spill nor need more shared memory than the architecture has. All warps lie along
    the queries where there are at least as many as keys, as the dropout mask's layout wants."""
    architecture, columns = launcher.architecture(q.device), width(q.shape[-1])
    if q.dtype == torch.float32:
        heuristic = Config(32, 32, 4)
    elif columns <= 64:
        heuristic = Config(128, 64, 8, 3) if architecture < 90 else Config(128, 64 if documents else 128, 8, 2)
    else:
        heuristic = Config(128, 64, 8, 2)
    shape = {"head_size": q.shape[-1], "dropout": drops, "documents": documents}
    return launcher.configure("flash_attention_forward", heuristic, q, **shape)


def flash_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sample_numbers: Tensor | None, document_starts: Tensor | None,
    scale: float, p: float, seed: int, layer: int, head_offset: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [b, n, s, d] like q, laid out as [s, b, n, d]; lse fp32 [b, n, s])."""
    b, heads, s, _ = q.shape
    out = empty_heads(q, heads)
    lse = torch.empty(b, heads, s, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return out, lse
    (q, k, v), unit = dense_rows(q, k, v)
    config = _config(q, sample_numbers is not None, document_starts is not None)
    launcher.launch(
        _forward_kernel, (triton.cdiv(s, config.rows) * b * heads,), q, k, v, out, lse,
        None if sample_numbers is None else sample_numbers.contiguous(),
        None if document_starts is None else document_starts.contiguous(),
        heads, heads // k.shape[1], s, *strides(q, unit), *strides(k, unit), *strides(v, unit),
        scale, *mask_words(p, seed, layer, head_offset, heads),
        config=config, **flags(q, sample_numbers, document_starts, unit), M=config.rows, N=config.columns,
    )  # fmt: skip
    return out, lse
