"""Parameters and their main gradients as views of two flat buffers, and their exchange over data parallelism.

docs/gradients.md states the contract: who adds, who divides, in which dtype and order. ``layout.py`` says what lies
where.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trimegatron.collectives import start_all_gather, start_reduce_scatter
from trimegatron.data_parallel.layout import BUCKET_SIZE, Bucket, ParameterSlice, Shard, lay_out
from trimegatron.mesh import Mesh
from trimegatron.tensor_parallel.parameter import ParameterSpec


class ParameterBuffer:
    """The parameters of a model in one flat tensor, their main gradients in another, both cut into buckets.

    A step is ``start``, the backward passes of all micro-batches, ``finish``, and the optimizer, which ends with
    ``gather_params``. Each data-parallel rank sums one shard of every bucket; ``shards`` are this rank's. With
    ``shard_optimizer`` (ZeRO 1) the optimizer updates these and the parameters are gathered; without, the gradients
    are gathered and the optimizer updates all: the same bytes and the same bits. ``updated`` is what it updates here.

    Gradients of the parameters' own dtype accumulate where they are (``parameter.grad`` is the view); others are
    added into the main gradient, and dropped, by a hook as soon as each is there.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        grad_dtype: torch.dtype,
        mesh: Mesh | None = None,
        bucket_size: int = BUCKET_SIZE,
        shard_optimizer: bool = False,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
    ):
        """
        Args:
            mesh: whom to exchange with; a single process without it.
            bucket_size: parameters of a bucket, at least.
            overlap_grad_reduce: reduce a bucket as soon as its gradients are complete, not after the backward pass.
            overlap_param_gather: gather parameters while the next step goes on, which :meth:`wait_before` makes safe.
        """
        named = list(named_parameters)
        first = named[0][1]
        mesh = mesh or Mesh(first.device)
        self.data, self.tensor, self.embedding = mesh.data, mesh.tensor, mesh.embedding
        self.shard_optimizer = shard_optimizer
        self.overlap_grad_reduce = overlap_grad_reduce and self.data.group is not None
        self.overlap_param_gather = overlap_param_gather
        self.buckets = lay_out(named, num_shards=self.data.size, bucket_size=bucket_size)
        self.slices: list[ParameterSlice] = [piece for bucket in self.buckets for piece in bucket.slices]
        self.shards = [self._shard_of(bucket) for bucket in self.buckets]
        whole = [Shard(bucket, bucket.start, bucket.start, bucket.stop - bucket.start) for bucket in self.buckets]
        self.updated = self.shards if shard_optimizer else whole
        self.counted_runs = [run for shard in self.shards for run in shard.runs(self._counts)]
        self.params = torch.zeros(self.buckets[-1].stop, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros(self.buckets[-1].stop, dtype=grad_dtype, device=first.device)
        for index, bucket in enumerate(self.buckets):
            for piece in bucket.slices:
                assert piece.parameter.dtype == first.dtype and piece.parameter.device == first.device
                self._adopt(piece, index)
        self._missing: list[int] | None = None  # accumulations that each bucket still waits for; None: not armed
        self._num_launched = 0
        self._reductions: dict[int, Any] = {}
        self._gathers: dict[int, Any] = {}

    def _shard_of(self, bucket: Bucket) -> Shard:
        size = (bucket.stop - bucket.start) // self.data.size
        start = bucket.start + self.data.rank * size
        # The optimizer's tensors hold the shards of this rank one after another, or all there is.
        return Shard(bucket, start, bucket.start // self.data.size if self.shard_optimizer else start, size)

    def _adopt(self, piece: ParameterSlice, index: int) -> None:
        parameter, main_grad = piece.parameter, piece.view(self.grads)
        with torch.no_grad():
            piece.view(self.params).copy_(parameter)
            parameter.data = piece.view(self.params)
        is_in_place = parameter.dtype == self.grads.dtype
        if is_in_place:
            parameter.grad = main_grad

        # Python's garbage collection does not see what a hook holds: with the buffer in it, the process groups would
        # outlive a failed run, and the other ranks wait for this one.
        count = weakref.WeakMethod(self._count)

        def accumulated(p: torch.Tensor) -> None:
            if not is_in_place:
                assert p.grad is not None
                main_grad.add_(p.grad)
                p.grad = None
            if (count_one := count()) is not None:
                count_one(index)

        parameter.register_post_accumulate_grad_hook(accumulated)

    def _counts(self, spec: ParameterSpec) -> bool:
        """Whether this tensor-parallel rank answers for the parameter in a sum over the whole model: for one that all
        hold alike the first does, for a copy of another stage's nobody."""
        return (spec.is_sharded or self.tensor.rank == 0) and not spec.is_tied_copy

    def saves(self, spec: ParameterSpec) -> bool:
        """Whether this rank saves what it updates of the parameter: of several that update the same, one does."""
        return self._counts(spec) and (self.shard_optimizer or self.data.rank == 0)

    def counted_grads(self) -> Iterator[tuple[torch.Tensor, bool]]:
        """The parts of the reduced gradient that this rank answers for in a sum over all ranks, and whether they are
        of parameters that decay."""
        for run in self.counted_runs:
            yield self.grads[run.flat : run.flat + run.length], run.decays

    def count_zero_grads(self) -> torch.Tensor:
        """How many elements of the gradient are exactly zero, of those this rank answers for; not of padding."""
        zeros = torch.zeros((), dtype=torch.int64, device=self.grads.device)
        for shard in self.shards:
            for piece, _, rows in shard.rectangles(self.grads, shard.flat):
                if self._counts(piece.spec):
                    zeros += (rows == 0).sum()
        return zeros

    # The step

    def start(self, num_micro_batches: int) -> None:
        """Set the main gradients to zero. Every parameter will be accumulated ``num_micro_batches`` times."""
        self.grads.zero_()
        self._missing = [num_micro_batches * len(bucket.slices) for bucket in self.buckets]
        self._num_launched = 0

    def finish(self) -> None:
        """Sum the gradients over all ranks that hold a part of them; nobody divides (docs/gradients.md).

        Afterwards this rank's shards are whole, and without ``shard_optimizer`` all of ``grads``.
        """
        assert self._missing is not None, "start() comes first"
        late = [bucket.slices for bucket, missing in zip(self.buckets, self._missing, strict=True) if missing]
        assert not late, f"gradients are missing, or too many, in the bucket of {late[0][0].name}"
        self._missing = None
        for bucket in self.buckets:
            if bucket.is_partial and self.tensor.group is not None:
                dist.all_reduce(bucket.of(self.grads), group=self.tensor.group)
        while self._num_launched < len(self.buckets):
            self._launch_reduction()
        for index in range(len(self.buckets)):
            self._complete_reduction(index)
        self._wait_for_gathers(range(len(self.buckets)))

    def _count(self, index: int) -> None:
        """One more gradient is in; reduce what is complete, on every rank in the order of the buckets."""
        if self._missing is None:
            return
        self._missing[index] -= 1
        while self.overlap_grad_reduce and self._num_launched < len(self.buckets):
            following = self._num_launched
            if self._missing[following] or self.buckets[following].is_partial:
                break  # partial sums are summed over tensor parallelism first, in finish()
            self._launch_reduction()
            if following > 0 and not self.shard_optimizer and not self.buckets[following - 1].is_tied:
                self._complete_reduction(following - 1)  # one behind, so that its gathering overlaps too

    def _launch_reduction(self) -> None:
        index = self._num_launched
        self._num_launched += 1
        if self.data.group is not None:
            bucket, shard = self.buckets[index], self.shards[index]
            self._reductions[index] = start_reduce_scatter(bucket.of(self.grads), shard.of(self.grads), self.data.group)

    def _complete_reduction(self, index: int) -> None:
        """Wait for the sum over data parallelism, add the other stage's part, and gather where all is updated here."""
        if index in self._reductions:
            self._reductions.pop(index).wait()
        elif self.data.group is not None:
            return  # it was completed before
        bucket, shard = self.buckets[index], self.shards[index]
        if bucket.is_tied and self.embedding.group is not None:
            dist.all_reduce(shard.of(self.grads), group=self.embedding.group)
        if not self.shard_optimizer:
            self._start_gather(self.grads, index)

    # Gathering

    def gather_params(self) -> None:
        """Give every data-parallel rank the parameters that the others have updated, in the order of the forward
        pass: where they do not overlap with it, before this returns."""
        if self.shard_optimizer:
            for index in reversed(range(len(self.buckets))):
                self._start_gather(self.params, index)
            if not self.overlap_param_gather:
                self.wait_for_params()

    def wait_for_params(self) -> None:
        """Until this returns, parameters may still be on their way from other ranks."""
        self._wait_for_gathers(range(len(self.buckets)))

    def wait_before(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Wait for ``parameters`` before each forward pass of ``module``, where gathering overlaps with it."""
        needed = set(parameters)
        indices = [i for i, bucket in enumerate(self.buckets) if any(p.parameter in needed for p in bucket.slices)]
        module.register_forward_pre_hook(lambda *_: self._wait_for_gathers(indices))

    def _start_gather(self, flat: torch.Tensor, index: int) -> None:
        if self.data.group is not None:
            bucket, shard = self.buckets[index], self.shards[index]
            self._gathers[index] = start_all_gather(bucket.of(flat), shard.of(flat), self.data.group)

    def _wait_for_gathers(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index in self._gathers:
                self._gathers.pop(index).wait()
