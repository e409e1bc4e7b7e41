"""Buckets and shards: who is where, and that every cut is on a row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from trimegatron.data_parallel.layout import ALIGNMENT, SHARD_ALIGNMENT, Bucket, Shard, lay_out, row_kinds
from trimegatron.mesh import Axis
from trimegatron.tensor_parallel.parameter import make_parameter


def parameter(*shape: int, **changes) -> nn.Parameter:
    return make_parameter(shape, dtype=torch.float32, device=torch.device("cpu"), **changes)


def model(rank: int = 0, *, is_tied_copy: bool = False) -> list[tuple[str, nn.Parameter]]:
    """In the order of a model; rows of 24, 36 and 48, and a part of a table of 211 words that has padding."""
    axis = Axis(2, rank)
    table = parameter(211, 24, shard_dim=0, axis=axis, padded_size=224, is_tied=True, is_tied_copy=is_tied_copy)
    named = [("table", table), ("positions", parameter(10, 24))]
    for layer in range(3):
        named += [
            (f"{layer}.norm", parameter(24, is_partial=True)),
            (f"{layer}.up.weight", parameter(96, 24, shard_dim=0, axis=axis)),
            (f"{layer}.up.bias", parameter(96, shard_dim=0, axis=axis)),
            (f"{layer}.down.weight", parameter(24, 96, shard_dim=1, axis=axis)),
            (f"{layer}.down.bias", parameter(24, is_partial=True)),
            (f"{layer}.rest", parameter(5, 36)),
            (f"{layer}.scale", parameter(7)),
        ]
    return named


def shards_of(bucket: Bucket, num_shards: int) -> list[Shard]:
    size = (bucket.stop - bucket.start) // num_shards
    return [Shard(bucket, bucket.start + i * size, 0, size) for i in range(num_shards)]


def test_order():
    """Reverse order of the model, each bucket filled; a head's copy first, else the table behind; partial sums last."""
    buckets = lay_out(model(), num_shards=2, bucket_size=2000)
    names = [{piece.name for piece in bucket.slices} for bucket in buckets]
    assert names[0] == {"2.scale", "2.rest", "2.down.weight", "2.up.bias", "2.up.weight"}
    assert names[-2] == {"table"} and buckets[-2].is_tied
    assert names[-1] == {f"{i}.{name}" for i in range(3) for name in ("norm", "down.bias")} and buckets[-1].is_partial
    assert "positions" in names[-3]
    assert lay_out(model(is_tied_copy=True), num_shards=2, bucket_size=2000)[0].slices[0].name == "table"
    assert len(lay_out(model(), num_shards=2, bucket_size=10**9)) == 3


def test_the_table_is_cut_alike_wherever_it_lies():
    (first,) = (b for b in lay_out(model(), num_shards=4, bucket_size=500) if b.is_tied)
    (last,) = (b for b in lay_out(model(is_tied_copy=True), num_shards=4, bucket_size=500) if b.is_tied)
    assert first.stop - first.start == last.stop - last.start
    assert [p.start - first.start for p in first.slices] == [p.start - last.start for p in last.slices] == [0]


@pytest.mark.parametrize("bucket_size", [1, 700, 3000, 10**9])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 8])
def test_every_cut_is_on_a_row(num_shards: int, bucket_size: int):
    """The rectangles of all shards are each parameter, once, without its padding; runs are aligned and decay alike."""
    named = model(rank=1)
    buckets = lay_out(named, num_shards=num_shards, bucket_size=bucket_size)
    assert [b.start for b in buckets] == [0, *(b.stop for b in buckets[:-1])]
    assert sorted(piece.name for b in buckets for piece in b.slices) == sorted(name for name, _ in named)
    flat = torch.arange(buckets[-1].stop, dtype=torch.float32)
    seen = {name: torch.zeros(p.spec.extent) for name, p in named}  # type: ignore[attr-defined]
    for bucket in buckets:
        for piece, following in itertools.pairwise(bucket.slices):
            assert piece.start + piece.parameter.numel() <= piece.stop == following.start
            assert piece.decays >= following.decays
        for shard in shards_of(bucket, num_shards):
            assert (shard.flat - bucket.start) % SHARD_ALIGNMENT == 0
            for piece, first, rows in shard.rectangles(flat, shard.flat):
                assert (piece.start - bucket.start) % math.lcm(ALIGNMENT, *piece.parameter.shape[1:]) == 0
                assert torch.equal(rows, piece.spec.valid(piece.view(flat))[first : first + len(rows)])
                seen[piece.name][first : first + len(rows)] += 1
            runs = list(shard.runs())
            assert sum(run.length for run in runs) == shard.length
            assert all(run.flat % ALIGNMENT == run.length % ALIGNMENT == 0 for run in runs)
            assert [run.decays for run in runs] in ([True], [False], [True, False])
    for name, count in seen.items():
        assert bool((count == 1).all()), name


def test_runs_of_what_is_wanted():
    """What every tensor-parallel rank holds alike is one run of a bucket at most beside that of the others."""
    for bucket in lay_out(model(), num_shards=2, bucket_size=10**9):
        for shard in shards_of(bucket, 2):
            sharded = list(shard.runs(lambda spec: spec.is_sharded))
            replicated = list(shard.runs(lambda spec: not spec.is_sharded))
            assert len(sharded) <= 2 and len(replicated) <= 2
            assert sum(run.length for run in sharded + replicated) == shard.length
            for run in sharded:
                names = [p.name for p in bucket.slices if p.start < run.flat + run.length and p.stop > run.flat]
                assert all(".up." in name or ".down.weight" in name or name == "table" for name in names)


def test_rows_without_common_factors_do_not_share_buckets():
    """A model 1023 wide with an MLP of 2731: together its rows would make a shard a multiple of 357 million."""
    assert set(row_kinds([1, 768, 3072]).values()) == set(row_kinds([1, 1000, 4000]).values()) == {0}
    kinds = row_kinds([1, 1023, 2731])
    assert kinds[1023] != kinds[2731]
    named = [("up", parameter(2731, 1023)), ("down", parameter(1023, 2731)), ("bias", parameter(1023))]
    for num_shards in (1, 4):
        size = lay_out(named, num_shards=num_shards, bucket_size=10**7)[-1].stop
        assert size < 1.3 * sum(p.numel() for _, p in named)
