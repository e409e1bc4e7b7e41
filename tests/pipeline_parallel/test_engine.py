"""The engine by itself: any number of micro-batches, changing from call to call, with large messages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.pipelining  # (here once, not in each forked rank)
from torch import nn

from tests.parallel import run_ranks
from trimegatron.data.loader import Batch
from trimegatron.mesh import Axis, close_mesh, init_mesh
from trimegatron.pipeline_parallel.engine import Engine, runs_as

SHAPE = (512, 2, 1024)  # an activation of 4 MB: far more than a socket holds


class Stage(nn.Module):
    """x · weight, and on the last stage the weighted sum of it."""

    def __init__(self, index: int, num_stages: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 1.0 + index))
        self.is_first, self.is_last = index == 0, index == num_stages - 1

    def forward(self, x: torch.Tensor, *, loss_mask: torch.Tensor, sample_numbers: torch.Tensor, **_: object):
        if self.is_first:
            x = x.float().mean() * torch.ones(SHAPE)
        x = x * self.weight * sample_numbers[0]
        return (x[:2, :, 0].t() * loss_mask).sum() if self.is_last else x


def micro_batches(count: int) -> list[Batch]:
    tokens = torch.arange(4 * count).view(count, 2, 2)
    mask = torch.ones(2, 2)
    return [Batch(tokens[i], tokens[i], mask / (i + 1), torch.tensor([i + 1, i + 1])) for i in range(count)]


CALLS = [(4, True), (4, True), (2, False), (6, True), (2, True), (4, False), (4, True)]
ANY_NUMBER = [(1, True), (3, True), (5, True), (1, False)]


def run_calls(num_chunks: int, schedule: str, calls: list[tuple[int, bool]], axis: Axis) -> list[tuple]:
    """(loss sum, tokens, gradients of this rank's chunks) after each call."""
    num_stages = axis.size * num_chunks
    chunks = [Stage(i, num_stages) for i in range(axis.rank, num_stages, axis.size)]
    engine = Engine(chunks, pipeline=axis, schedule=schedule, activation=torch.empty(SHAPE, device="meta"))
    results = []
    for count, trains in calls:
        for chunk in chunks:
            chunk.weight.grad = None
        with torch.set_grad_enabled(trains):
            loss, tokens = engine.run(micro_batches(count), backward_scale=0.5 if trains else None)
        grads = [0.0 if chunk.weight.grad is None else chunk.weight.grad.item() for chunk in chunks]
        results.append((loss.item(), tokens.item(), grads))
    return results


def on_ranks() -> list[list[tuple]]:
    mesh = init_mesh(torch.device("cpu"), pipeline_parallel_size=2)
    assert mesh.maximum(2**40 + mesh.world.rank) == 2**40 + 1
    results = [
        run_calls(1, "1f1b", CALLS + ANY_NUMBER, mesh.pipeline),
        run_calls(1, "gpipe", CALLS + ANY_NUMBER, mesh.pipeline),
        run_calls(2, "interleaved", CALLS, mesh.pipeline),
    ]
    close_mesh()
    return results


def by_hand(num_stages: int, count: int, trains: bool) -> tuple[float, float, list[float]]:
    """A micro-batch's loss = mean of its tokens · Π weights · number^stages · Σ mask, its gradients loss / weight."""
    weights = [1.0 + i for i in range(num_stages)]
    loss = tokens = 0.0
    for batch in micro_batches(count):
        product = batch.tokens.float().mean().item() * batch.sample_numbers[0].item() ** num_stages
        for weight in weights:
            product *= weight
        loss += product * batch.loss_mask.sum().item()
        tokens += batch.loss_mask.sum().item()
    return loss, tokens, [loss * 0.5 / weight if trains else 0.0 for weight in weights]


def test_any_number_of_micro_batches_in_any_order():
    first, second = run_ranks(2, on_ranks)
    for k, num_stages in enumerate((2, 2, 4)):
        calls = CALLS + ANY_NUMBER if num_stages == 2 else CALLS
        for call, one, other in zip(calls, first[k], second[k], strict=True):
            loss, tokens, grads = by_hand(num_stages, *call)
            assert one[0] == 0.0 and other[0] == pytest.approx(loss), call
            assert one[1] == other[1] == pytest.approx(tokens), call
            assert [grad for pair in zip(one[2], other[2], strict=True) for grad in pair] == pytest.approx(grads), call


def test_what_runs_where_1f1b_cannot():
    assert runs_as("1f1b", 3, 4) == "gpipe"
    assert runs_as("1f1b", 4, 4) == "1f1b"
    assert runs_as("interleaved", 2, 4) == "interleaved"
