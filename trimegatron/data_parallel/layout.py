"""Where every parameter lies in the flat buffers: buckets, their shards, and what is alike within them.

Nothing here holds memory or talks to anyone. The rules, which every rank of a data-parallel group follows alike:

- Buckets are filled in reverse order of the model, so that the backward pass completes one after another. A copy of
  the tied word table, a head's, comes before all others, since its gradient is complete first; the table that is also
  looked up comes behind them, and each is alone in its bucket, so that first and last stage cut it alike. Last
  come the parameters whose gradients are partial sums, all in one bucket for one all-reduce.
- A parameter starts at a multiple of lcm(row length, ``ALIGNMENT``) elements in its bucket, and the length of a shard
  is one of lcm(row lengths in the bucket, ``SHARD_ALIGNMENT``). So every cut is on a row: what a shard holds of a
  parameter is a rectangle, also where one parameter holds several cuts. Row lengths that would make that a large
  number do not share buckets.
- Within a bucket what decays (two or more dimensions, as Megatron's) comes first, and what all tensor-parallel ranks
  hold alike is together, so that both are few long runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from trimegatron.config.groups import ParallelConfig
from trimegatron.kernels.adamw_runs import ALIGNMENT, Run
from trimegatron.tensor_parallel.parameter import ParameterSpec, spec_of

SHARD_ALIGNMENT = 128
"""Every shard starts at a multiple of this many elements."""

BUCKET_SIZE: int = ParallelConfig.ddp_bucket_size
"""Parameters of a bucket where nothing is said: 40 MB of fp32 gradients, long enough for the full rate of a network."""

MAX_PADDING = 16
"""How many times the length that the longest rows alone would ask for a shard's length may be a multiple of."""

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class ParameterSlice:
    """Where one parameter lies in the buffers, in elements; ``stop`` is where the next one starts."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int

    @property
    def spec(self) -> ParameterSpec:
        return spec_of(self.parameter)

    @property
    def decays(self) -> bool:
        """Whether weight decay acts on it."""
        return decays(self.parameter)

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a buffer that is laid out alike, in its own shape."""
        return flat[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie together and are reduced together, in elements of the buffer."""

    start: int
    stop: int
    slices: tuple[ParameterSlice, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The bucket's elements of a buffer, a view."""
        return flat[self.start : self.stop]

    @property
    def is_tied(self) -> bool:
        return self.slices[0].spec.is_tied

    @property
    def is_partial(self) -> bool:
        return self.slices[0].spec.is_partial


@dataclass(frozen=True)
class Shard:
    """``length`` elements of a bucket, from ``flat`` on in the buffer and from ``state`` on in the optimizer's tensors.

    The names are those of ``Run``.
    """

    bucket: Bucket
    flat: int
    state: int
    length: int

    @property
    def stop(self) -> int:
        return self.flat + self.length

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements of a buffer, a view."""
        return flat[self.flat : self.stop]

    def runs(self, wanted: Callable[[ParameterSpec], bool] = lambda spec: True) -> Iterator[Run]:
        """The longest runs of parameters that are ``wanted`` and decay alike; padding, which is zero, is with them."""
        mine = [
            (max(piece.start, self.flat), min(piece.stop, self.stop), piece.decays)
            for piece in self.bucket.slices
            if piece.start < self.stop and piece.stop > self.flat and wanted(piece.spec)
        ]
        while mine:
            start, stop, decayed = mine.pop(0)
            while mine and mine[0][0] == stop and mine[0][2] == decayed:
                stop = mine.pop(0)[1]
            yield Run(start, self.state + start - self.flat, stop - start, decayed)

    def rectangles(self, flat: torch.Tensor, base: int) -> Iterator[tuple[ParameterSlice, int, torch.Tensor]]:
        """What the shard holds of each parameter: the parameter, the first of its rows, and these rows without their
        padding, as a view of ``flat``, in which the shard starts at ``base``. Parameters of which only padding lies
        here are left out."""
        for piece in self.bucket.slices:
            shape = piece.parameter.shape
            row = math.prod(shape[1:])
            first = max(0, self.flat - piece.start) // row
            last = min(shape[0], max(0, self.stop - piece.start) // row, piece.spec.extent[0])
            if first < last:
                begin = base + piece.start + first * row - self.flat
                rows = flat[begin : begin + (last - first) * row].view(last - first, *shape[1:])
                for dim, size in enumerate(piece.spec.extent[1:], start=1):
                    rows = rows.narrow(dim, 0, size)
                yield piece, first, rows


def decays(parameter: nn.Parameter) -> bool:
    return parameter.dim() >= 2


def lay_out(named_parameters: Iterable[Named], *, num_shards: int, bucket_size: int) -> list[Bucket]:
    """The buckets, in the order in which they are reduced; one follows another without a gap."""
    buckets: list[Bucket] = []
    backwards = list(named_parameters)[::-1]
    kinds = row_kinds(row_length(parameter) for _, parameter in backwards)

    def turn(item: Named) -> tuple[int, int]:
        return _turn(item), kinds[row_length(item[1])]

    for _, group in itertools.groupby(sorted(backwards, key=turn), key=turn):  # sorting keeps the order in each turn
        for members in _fill(list(group), bucket_size):
            buckets.append(_make_bucket(members, buckets[-1].stop if buckets else 0, num_shards))
    return buckets


def row_length(parameter: nn.Parameter) -> int:
    """Elements of one row; 1 for a vector."""
    return math.prod(parameter.shape[1:])


def row_kinds(lengths: Iterable[int]) -> dict[int, int]:
    """Which row lengths share buckets: row length → number of its kind.

    Rows that have few factors in common, such as 1023 and 2731, would make a shard a multiple of their product; those
    are kept apart. Nearly every model has one kind.
    """
    kinds: list[set[int]] = []
    for length in sorted(set(lengths)):
        alone = math.lcm(length, SHARD_ALIGNMENT)
        for kind in kinds:
            if math.lcm(alone, *kind) <= MAX_PADDING * alone:
                kind.add(length)
                break
        else:
            kinds.append({length})
    return {length: number for number, kind in enumerate(kinds) for length in kind}


def _turn(item: Named) -> int:
    """Copies of the word table, then most parameters, then the word table, then partial sums."""
    spec = spec_of(item[1])
    return 3 if spec.is_partial else 0 if spec.is_tied_copy else 2 if spec.is_tied else 1


def _fill(members: list[Named], bucket_size: int) -> Iterator[list[Named]]:
    """Consecutive members, until a bucket holds ``bucket_size`` parameters; those of one all-reduce stay together."""
    if spec_of(members[0][1]).is_partial:
        yield members
        return
    bucket: list[Named] = []
    for member in members:
        bucket.append(member)
        if sum(parameter.numel() for _, parameter in bucket) >= bucket_size:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _make_bucket(members: list[Named], start: int, num_shards: int) -> Bucket:
    def place(item: Named) -> int:
        """Decayed, sharded | decayed, replicated | others, replicated | others, sharded."""
        is_sharded = spec_of(item[1]).is_sharded
        return (0 if is_sharded else 1) if decays(item[1]) else (3 if is_sharded else 2)

    members = sorted(members, key=place)
    rows = [row_length(parameter) for _, parameter in members]
    starts = []
    end = 0
    for (_, parameter), row in zip(members, rows, strict=True):
        starts.append(start + _round_up(end, math.lcm(row, ALIGNMENT)))
        end = starts[-1] - start + parameter.numel()
    stop = start + _round_up(end, num_shards * math.lcm(*rows, SHARD_ALIGNMENT))
    slices = tuple(
        ParameterSlice(name, parameter, first, after)
        for (name, parameter), first, after in zip(members, starts, [*starts[1:], stop], strict=True)
    )
    return Bucket(start, stop, slices)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
