"""Gradients summed over the ranks that hold a part of them: in which order, when, and by whom."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel import run_ranks
from trimegatron.collectives import start_all_gather, start_reduce_scatter
from trimegatron.data_parallel import buffer as module
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.mesh import Axis, Mesh, close_mesh, init_mesh
from trimegatron.model.build import wait_for_parameters
from trimegatron.model.gpt import GPTChunks, GPTStage
from trimegatron.model.init import initialize
from trimegatron.model.spec import GPTSpec
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.tensor_parallel.parameter import make_parameter

CPU = torch.device("cpu")
NUM_MICRO_BATCHES = 3
Named = list[tuple[str, nn.Parameter]]
SHAPES = [(9, 12), (12,), (30, 8), (8, 20), (20,), (64, 3)]


def parameters(dtype: torch.dtype, **changes) -> Named:
    return [(f"p{i}", make_parameter(shape, dtype=dtype, device=CPU, **changes)) for i, shape in enumerate(SHAPES)]


def gradient(name: str, shape: torch.Size, rank: int, micro_batch: int) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype and order."""
    seed = hash((int(name[1:]), rank, micro_batch)) % 2**31
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def backward(named: Named, rank: int, *, log: list[Any] | None = None, forwards: bool = False) -> None:
    """All micro-batches, one parameter after another, the model's last first; each one's name goes to the log."""
    for micro_batch in range(NUM_MICRO_BATCHES):
        for name, parameter in named if forwards else reversed(named):
            (parameter * gradient(name, parameter.shape, rank, micro_batch).to(parameter.dtype)).sum().backward()
            if log is not None:
                log.append(name)


def expected(name: str, shape: torch.Size, ranks: range) -> torch.Tensor:
    return sum((gradient(name, shape, r, m) for r in ranks for m in range(NUM_MICRO_BATCHES)), torch.zeros(shape))


@contextmanager
def recorded(buffer: ParameterBuffer, log: list[Any]) -> Iterator[None]:
    """The number of each bucket goes to the log when its reduction starts."""

    def start(flat: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
        log.append([bucket.start for bucket in buffer.buckets].index(flat.storage_offset()))
        return start_reduce_scatter(flat, shard, group)

    with mock.patch.object(module, "start_reduce_scatter", start):
        yield


WAYS = {
    "overlapped": ["p5", 0, "p4", "p3", 1, "p2", "p1", 2, "p0"],
    "late": ["p5", "p4", "p3", "p2", "p1", "p0", 0, 1, 2],
    "first bucket complete last": ["p0", "p1", "p2", "p3", "p4", 0, 1, 2, "p5"],
}
"""The last micro-batch: gradients, and the buckets (p5 p4 | p3 p2 | p1 p0), whose reduction starts inside a gradient's
backward pass."""


def sums_and_order() -> dict[str, list[Any]]:
    """On each rank: all sums, for both ways and dtypes; returns the log of each last micro-batch."""
    mesh = init_mesh(CPU)
    logs = {}
    try:
        for dtype, shard_optimizer, way in itertools.product((torch.float32, torch.bfloat16), (False, True), WAYS):
            named = parameters(dtype)
            buffer = ParameterBuffer(
                named, grad_dtype=torch.float32, mesh=mesh, bucket_size=200,
                shard_optimizer=shard_optimizer, overlap_grad_reduce=way != "late",
            )  # fmt: skip
            log: list[Any] = []
            with recorded(buffer, log):
                for _ in range(2):  # the second step finds nothing left of the first
                    buffer.start(NUM_MICRO_BATCHES)
                    backward(named, mesh.data.rank, log=log, forwards=way.startswith("first"))
                    buffer.finish()
            logs[f"{dtype} {shard_optimizer} {way}"] = log[-len(WAYS[way]) :]
            for shard in buffer.updated:
                for piece, first, rows in shard.rectangles(buffer.grads, shard.flat):
                    total = expected(piece.name, piece.parameter.shape, range(mesh.data.size))
                    assert torch.equal(rows, total[first : first + len(rows)]), (dtype, way, piece.name)
        return logs
    finally:
        close_mesh()


@pytest.mark.parametrize("world_size", [2, 4])
def test_buckets_are_reduced_in_order_as_they_are_complete(world_size: int):
    for logs in run_ranks(world_size, sums_and_order):
        assert len(logs) == 12
        for key, log in logs.items():
            assert log == WAYS[key.split(maxsplit=2)[2]], key


def sums_over_other_axes() -> None:
    """Two by two ranks: the partial sums of sequence parallelism, and the word table of the first and last stage."""
    mesh = init_mesh(CPU, tensor_parallel_size=2)
    try:
        for shard_optimizer in (False, True):
            named = parameters(torch.float32, is_partial=True)
            buffer = ParameterBuffer(
                named, grad_dtype=torch.float32, mesh=mesh, bucket_size=1, shard_optimizer=shard_optimizer,
                overlap_grad_reduce=True,
            )  # fmt: skip
            assert len(buffer.buckets) == 1
            buffer.start(NUM_MICRO_BATCHES)
            backward(named, mesh.world.rank)
            buffer.finish()
            for shard in buffer.updated:
                for piece, first, rows in shard.rectangles(buffer.grads, shard.flat):
                    total = expected(piece.name, piece.parameter.shape, range(4))
                    assert torch.equal(rows, total[first : first + len(rows)]), piece.name
        as_stages = dataclasses.replace(mesh, tensor=Axis(), pipeline=mesh.tensor, embedding=mesh.tensor)
        for shard_optimizer in (False, True):
            table_sums(as_stages, shard_optimizer)
    finally:
        close_mesh()


def table_sums(mesh: Mesh, shard_optimizer: bool) -> None:
    is_last = mesh.pipeline.rank == 1
    table = make_parameter(
        (211, 8), padded_size=216, shard_dim=0, is_tied=True, is_tied_copy=is_last, dtype=torch.float32, device=CPU
    )
    named = [("p0", table), ("p1", make_parameter((12, 8), dtype=torch.float32, device=CPU))]
    if is_last:
        named.append(("p2", make_parameter((50,), dtype=torch.float32, device=CPU)))
    buffer = ParameterBuffer(
        named, grad_dtype=torch.float32, mesh=mesh, shard_optimizer=shard_optimizer, overlap_grad_reduce=True
    )
    buffer.start(NUM_MICRO_BATCHES)
    backward(named, mesh.world.rank)
    buffer.finish()
    stage = range(mesh.pipeline.rank, 4, 2)  # the ranks of the mesh here: data-parallel rank · 2 + stage
    for shard in buffer.updated:
        for piece, first, rows in shard.rectangles(buffer.grads, shard.flat):
            total = expected(piece.name, piece.parameter.shape, range(4) if piece.name == "p0" else stage)
            assert torch.equal(rows, total[first : first + len(rows)]), piece.name
    count = torch.tensor([sum(part.numel() for part, _ in buffer.counted_grads()), buffer.count_zero_grads().item()])
    dist.all_reduce(count)
    # One table, both stages' own parameters, with their padding, each once over the data-parallel ranks.
    sizes = [bucket.stop - bucket.start for bucket in buffer.buckets if not bucket.slices[0].spec.is_tied_copy]
    everyone: list[list[int]] = [[] for _ in range(4)]
    dist.all_gather_object(everyone, sizes)
    assert count[0] == sum(everyone[0]) + sum(everyone[1])
    zeros = [(expected("p0", table.shape, range(4))[:211] == 0).sum()]
    zeros += [(expected("p1", torch.Size([12, 8]), range(s, 4, 2)) == 0).sum() for s in (0, 1)]
    zeros += [(expected("p2", torch.Size([50]), range(1, 4, 2)) == 0).sum()]
    assert count[1] == sum(zeros)


def test_sums_over_tensor_parallelism_and_stages():
    run_ranks(4, sums_over_other_axes)


def gathering_overlaps() -> list[str]:
    """A stage's forward pass after an update: what was gathered, waited for and computed, in order."""
    mesh = init_mesh(CPU)
    log: list[str] = []
    try:
        spec = GPTSpec(3, 24, 96, 3, 8, 8, 29, 32, attention_dropout=0.0, hidden_dropout=0.0)
        model = GPTStage(spec, range(3))
        initialize(model, 1)
        buffer = ParameterBuffer(
            model.named_parameters(), grad_dtype=torch.float32, mesh=mesh, bucket_size=6000, shard_optimizer=True,
            overlap_param_gather=True,
        )  # fmt: skip
        names = {}
        for bucket in buffer.buckets:
            layers = sorted({p.name.split(".")[1] for p in bucket.slices if p.name.startswith("layers.")})
            names[bucket.start] = "layers " + " ".join(layers)

        @dataclasses.dataclass
        class Logged:
            name: str
            work: Any

            def wait(self) -> None:
                log.append(f"wait for {self.name}")
                self.work.wait()

        def start(flat: torch.Tensor, shard: torch.Tensor, group: Any) -> Logged:
            log.append(f"gather {names[flat.storage_offset()]}")
            return Logged(names[flat.storage_offset()], start_all_gather(flat, shard, group))

        wait_for_parameters(GPTChunks([model]), buffer)
        for layer, part in model.layers.items():
            part.register_forward_hook(lambda *_, layer=layer: log.append(f"layer {layer}"))
        optimizer = FlatAdamW(buffer, beta1=0.9, beta2=0.95, epsilon=1e-8, kernels="auto")
        tokens = torch.arange(16).view(2, 8)
        buffer.start(1)
        model(tokens, labels=tokens).backward()
        buffer.finish()
        log.clear()
        with mock.patch.object(module, "start_all_gather", start):
            optimizer.step(lr=0.01, weight_decay=0.1, grad_multiplier=torch.ones(()))
            model.eval()
            with torch.no_grad():
                model(tokens, labels=tokens)
        return log
    finally:
        close_mesh()


def test_a_layer_waits_for_its_own_parameters_only():
    """Layer 0 shares a bucket with the tables, which the stage itself needs; layers share buckets at their ends."""
    for log in run_ranks(2, gathering_overlaps):
        assert log == [
            "gather layers 0", "gather layers 0 1", "gather layers 1 2", "gather layers 2",
            "wait for layers 0",
            "wait for layers 0 1", "layer 0",
            "wait for layers 1 2", "layer 1",
            "wait for layers 2", "layer 2",
        ]  # fmt: skip
