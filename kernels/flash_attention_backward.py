"""Gradients of ``flash_attention.py`` in Triton, without a matrix of scores and with the same bits every time.

With P = softmax(scale · q kᵀ), P' = P · keep / (1 - p) and δ = Σ_d do · o = Σ_keys P' (do vᵀ)::

    dv = P'ᵀ do        dS = P (keep / (1 - p) · do vᵀ - δ)        dq = scale · dS k        dk = scale · dSᵀ q

P comes from q, k and lse, keep from its coordinates. One kernel walks over keys for a tile of queries and gives dq and
δ, then one walks over queries for a tile of keys and gives dk and dv, summed over the query heads that share them. Each
makes P and keep anew: two products and one mask more than adding dq up with atomics would take, in no fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimegatron.kernels import launcher
from trimegatron.kernels.flash_attention import (
    dense_rows,
    empty_heads,
    flags,
    head_start,
    hide,
    load_rows,
    mask_words,
    store_rows,
    strides,
    width,
)
from trimegatron.kernels.launcher import Config
from trimegatron.kernels.philox_triton import tile_keep

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gradient_of_scores(
    q, k, v, dout, query, key, first, lse, delta, c, start, sample, seed, stream, threshold, dropout_scale, zero,
    DIAGONAL: tl.constexpr, DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(P' (1 - p), dS), both [M, N] fp32, for queries [M] and keys [N] from ``start``; ``lse`` is in base 2."""
    scores = hide(tl.dot(q, tl.trans(k), input_precision="ieee"), query, key, first, DIAGONAL, DOCUMENTS)
    weight = tl.exp2(scores * c - lse[:, None])
    upstream = tl.dot(dout, tl.trans(v), input_precision="ieee")
    kept = weight
    if DROPS:
        keep = tile_keep(query, start, sample, seed, stream, threshold, M, N)
        kept = tl.where(keep, weight, zero)
        upstream = tl.where(keep, upstream, zero)
    return kept, weight * (upstream * dropout_scale - delta[:, None])


@triton.jit
def _queries_tile(
    q, dout, k, v, query, first, lse, delta, start, stride_k, stride_v, s, c, acc,
    sample, seed, stream, threshold, dropout_scale, zero,
    DIAGONAL: tl.constexpr, DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """dq / scale with one more tile of keys."""
    key = start + tl.arange(0, N)
    k_tile = load_rows(k, key, stride_k, s, D, WIDTH, UNIT, DIAGONAL, UPCAST)
    v_tile = load_rows(v, key, stride_v, s, D, WIDTH, UNIT, DIAGONAL, UPCAST)
    _, gradient = _gradient_of_scores(
        q, k_tile, v_tile, dout, query, key, first, lse, delta, c, start,
        sample, seed, stream, threshold, dropout_scale, zero, DIAGONAL, DROPS, DOCUMENTS, M, N,
    )  # fmt: skip
    return tl.dot(gradient.to(k_tile.dtype), k_tile, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["seed", "stream", "threshold"])
def _queries_kernel(
    q, k, v, out, dout, lse, delta, dq, sample_numbers, document_starts, heads, group, s,
    q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n, v_s, o_b, o_n, o_s, do_b, do_n, do_s,
    scale, seed, stream, threshold, dropout_scale, zero,
    DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # q, k, v, out, dout [b, n, s, D] by strides; lse, delta [b, n, s]; dq [s, b, n, D]
    blocks = tl.cdiv(s, M)
    block = blocks - 1 - tl.program_id(0) % blocks
    batch, head = tl.program_id(0) // blocks // heads, tl.program_id(0) // blocks % heads
    stream += head
    k = head_start(k, batch, head // group, k_b, k_n, UNIT)
    v = head_start(v, batch, head // group, v_b, v_n, UNIT)
    query = block * M + tl.arange(0, M)
    q_tile = load_rows(head_start(q, batch, head, q_b, q_n, UNIT), query, q_s, s, D, WIDTH, UNIT, True, UPCAST)
    dout = head_start(dout, batch, head, do_b, do_n, UNIT)
    do_tile = load_rows(dout, query, do_s, s, D, WIDTH, UNIT, True, UPCAST)
    o_tile = load_rows(head_start(out, batch, head, o_b, o_n, UNIT), query, o_s, s, D, WIDTH, UNIT, True, UPCAST)
    row = (tl.cast(batch, tl.int64) * heads + head) * s + query
    along = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), axis=1)
    tl.store(delta + row, along, mask=query < s)
    level = tl.load(lse + row, mask=query < s, other=0.0) * _LOG2_E
    sample = tl.load(sample_numbers + batch) if DROPS else 0
    first = query
    begin = 0
    if DOCUMENTS:
        first = tl.load(document_starts + tl.cast(batch, tl.int64) * s + query, mask=query < s, other=s).to(tl.int32)
        begin = tl.min(first, axis=0) // N * N
    diagonal = block * M // N * N
    acc = tl.zeros([M, WIDTH], tl.float32)
    c = scale * _LOG2_E
    for start in tl.range(begin, diagonal, N):
        acc = _queries_tile(
            q_tile, do_tile, k, v, query, first, level, along, start, k_s, v_s, s, c, acc,
            sample, seed, stream, threshold, dropout_scale, zero,
            False, DROPS, DOCUMENTS, UNIT, UPCAST, D, WIDTH, M, N,
        )  # fmt: skip
    for start in tl.range(tl.maximum(begin, diagonal), tl.minimum(block * M + M, s), N):
        acc = _queries_tile(
            q_tile, do_tile, k, v, query, first, level, along, start, k_s, v_s, s, c, acc,
            sample, seed, stream, threshold, dropout_scale, zero,
            True, DROPS, DOCUMENTS, UNIT, UPCAST, D, WIDTH, M, N,
        )  # fmt: skip
    batches = tl.num_programs(0) // blocks // heads
    row_dq = dq + (tl.cast(batch, tl.int64) * heads + head) * D
    store_rows(row_dq, query, tl.cast(batches, tl.int64) * heads * D, s, acc * scale, D, WIDTH)


@triton.jit
def _keys_tile(
    k, v, q, dout, lse, delta, starts, key, start, begin, stride_q, stride_do, s, c, dk, dv,
    sample, seed, stream, threshold, dropout_scale, zero,
    DIAGONAL: tl.constexpr, DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(dk / scale, dv (1 - p)) with one more tile of queries, from ``begin``. Queries past the end have q, dout and δ
    of 0, and so no part in either."""
    query = begin + tl.arange(0, M)
    q_tile = load_rows(q, query, stride_q, s, D, WIDTH, UNIT, True, UPCAST)
    do_tile = load_rows(dout, query, stride_do, s, D, WIDTH, UNIT, True, UPCAST)
    level = tl.load(lse + query, mask=query < s, other=0.0) * _LOG2_E
    along = tl.load(delta + query, mask=query < s, other=0.0)
    first = query
    if DOCUMENTS:
        first = tl.load(starts + query, mask=query < s, other=0).to(tl.int32)
    kept, gradient = _gradient_of_scores(
        q_tile, k, v, do_tile, query, key, first, level, along, c, start,
        sample, seed, stream, threshold, dropout_scale, zero, DIAGONAL, DROPS, DOCUMENTS, M, N,
    )  # fmt: skip
    dv = tl.dot(tl.trans(kept.to(do_tile.dtype)), do_tile, dv, input_precision="ieee")
    dk = tl.dot(tl.trans(gradient.to(q_tile.dtype)), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _queries_end(starts, last_key, begin, s, CHUNK: tl.constexpr):
    """One past the last query from ``begin`` on whose document starts at or before ``last_key``."""
    end = tl.zeros([CHUNK], tl.int32)
    for chunk in tl.range(begin, s, CHUNK):
        query = chunk + tl.arange(0, CHUNK)
        first = tl.load(starts + query, mask=query < s, other=s)
        end = tl.where(first <= last_key, query + 1, end)
    return tl.minimum(tl.max(end, axis=0), s)


@triton.jit(do_not_specialize=["seed", "stream", "threshold"])
def _keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, sample_numbers, document_starts, kv_heads, group, s,
    q_b, q_n, q_s, k_b, k_n, k_s, v_b, v_n, v_s, do_b, do_n, do_s,
    scale, seed, stream, threshold, dropout_scale, zero,
    DROPS: tl.constexpr, DOCUMENTS: tl.constexpr, UNIT: tl.constexpr, UPCAST: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    # q, k, v, dout [b, n, s, D] by strides; lse, delta [b, n, s]; dk, dv [s, b, n_kv, D]
    blocks = tl.cdiv(s, N)
    block = tl.program_id(0) % blocks  # the first keys are seen by most queries
    batch, kv_head = tl.program_id(0) // blocks // kv_heads, tl.program_id(0) // blocks % kv_heads
    start = block * N
    key = start + tl.arange(0, N)
    k_tile = load_rows(head_start(k, batch, kv_head, k_b, k_n, UNIT), key, k_s, s, D, WIDTH, UNIT, True, UPCAST)
    v_tile = load_rows(head_start(v, batch, kv_head, v_b, v_n, UNIT), key, v_s, s, D, WIDTH, UNIT, True, UPCAST)
    sample = tl.load(sample_numbers + batch) if DROPS else 0
    starts = document_starts
    end = s
    if DOCUMENTS:
        starts += tl.cast(batch, tl.int64) * s
        end = _queries_end(starts, start + N - 1, start, s, 1024)
    begin = start // M * M
    below = tl.minimum(tl.cdiv(start + N, M) * M, end)  # from here on queries are after all keys
    dk_tile = tl.zeros([N, WIDTH], tl.float32)
    dv_tile = tl.zeros([N, WIDTH], tl.float32)
    c = scale * _LOG2_E
    for member in tl.range(0, group):
        head = kv_head * group + member
        row = (tl.cast(batch, tl.int64) * (kv_heads * group) + head) * s
        q_head = head_start(q, batch, head, q_b, q_n, UNIT)
        do_head = head_start(dout, batch, head, do_b, do_n, UNIT)
        for first in tl.range(begin, below, M):
            dk_tile, dv_tile = _keys_tile(
                k_tile, v_tile, q_head, do_head, lse + row, delta + row, starts, key, start, first, q_s, do_s, s, c,
                dk_tile, dv_tile, sample, seed, stream + head, threshold, dropout_scale, zero,
                True, DROPS, DOCUMENTS, UNIT, UPCAST, D, WIDTH, M, N,
            )  # fmt: skip
        for first in tl.range(below, end, M):
            dk_tile, dv_tile = _keys_tile(
                k_tile, v_tile, q_head, do_head, lse + row, delta + row, starts, key, start, first, q_s, do_s, s, c,
                dk_tile, dv_tile, sample, seed, stream + head, threshold, dropout_scale, zero,
                False, DROPS, DOCUMENTS, UNIT, UPCAST, D, WIDTH, M, N,
            )  # fmt: skip
    stride = tl.cast(tl.num_programs(0) // blocks, tl.int64) * D
    offset = (tl.cast(batch, tl.int64) * kv_heads + kv_head) * D
    store_rows(dk + offset, key, stride, s, dk_tile * scale, D, WIDTH)
    store_rows(dv + offset, key, stride, s, dv_tile * dropout_scale, D, WIDTH)


def _configs(q: Tensor, drops: bool, documents: bool) -> tuple[Config, Config]:
    """Of the walk over keys and of the walk over queries: the largest tiles that neither spill nor need more shared
    memory than there is. One stage is slower than two, and all that the registers leave."""
    architecture, narrow = launcher.architecture(q.device), width(q.shape[-1]) <= 64
    if q.dtype == torch.float32:
        heuristics = Config(32, 32, 8), Config(32, 32, 4)
    elif architecture >= 100:
        heuristics = Config(128, 64, 8, 2), Config(64, 64, 4, 2)
    elif architecture >= 90:
        queries_columns = 64 if narrow or not documents else 32
        heuristics = Config(128, queries_columns, 8, 2), Config(128, 64, 8, 2 if narrow and drops else 1)
    elif narrow:
        heuristics = Config(128, 64, 8, 2), Config(64, 64, 4, 2 if drops and not documents else 1)
    else:
        heuristics = Config(128, 32, 8, 2), Config(64, 64, 8, 2)
    names = ("flash_attention_backward_queries", "flash_attention_backward_keys")
    shape = {"head_size": q.shape[-1], "dropout": drops, "documents": documents}
    queries, keys = (
        launcher.configure(name, heuristic, q, **shape) for name, heuristic in zip(names, heuristics, strict=True)
    )
    return queries, keys


def flash_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    sample_numbers: Tensor | None, document_starts: Tensor | None,
    scale: float, p: float, seed: int, layer: int, head_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq [b, n, s, d], dk, dv [b, n_kv, s, d]) like q, k, v, laid out as [s, b, heads, d]."""
    b, heads, s, _ = q.shape
    kv_heads = k.shape[1]
    dq, dk, dv = empty_heads(q, heads), empty_heads(k, kv_heads), empty_heads(v, kv_heads)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    (q, k, v, out, dout), unit = dense_rows(q, k, v, out, dout)
    delta = torch.empty(b, heads, s, dtype=torch.float32, device=q.device)
    places = (
        None if sample_numbers is None else sample_numbers.contiguous(),
        None if document_starts is None else document_starts.contiguous(),
    )
    qkv_strides = (*strides(q, unit), *strides(k, unit), *strides(v, unit))
    constants = (scale, *mask_words(p, seed, layer, head_offset, heads))
    compiled_for = flags(q, sample_numbers, document_starts, unit)
    by_queries, by_keys = _configs(q, sample_numbers is not None, document_starts is not None)
    launcher.launch(
        _queries_kernel, (triton.cdiv(s, by_queries.rows) * b * heads,), q, k, v, out, dout, lse, delta, dq, *places,
        heads, heads // kv_heads, s, *qkv_strides, *strides(out, unit), *strides(dout, unit), *constants,
        config=by_queries, **compiled_for, M=by_queries.rows, N=by_queries.columns,
    )  # fmt: skip
    launcher.launch(
        _keys_kernel, (triton.cdiv(s, by_keys.columns) * b * kv_heads,), q, k, v, dout, lse, delta, dk, dv, *places,
        kv_heads, heads // kv_heads, s, *qkv_strides, *strides(dout, unit), *constants,
        config=by_keys, **compiled_for, M=by_keys.rows, N=by_keys.columns,
    )  # fmt: skip
    return dq, dk, dv
