"""``trimegatron bench bubble``: how long a pipeline's ranks wait, by simulation of each schedule's own order of passes.

A step's bubble is (time of the step − time a rank computes) / time a rank computes, on the rank that waits longest:
(p − 1) / (m v) in theory, with p ranks, v stages on each and m micro-batches (Narayanan et al. 2021, section 2.2).
Every stage takes as long as every other, and messages take no time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimegatron.bench.results import OURS, Result, counted
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, fail, option
from trimegatron.pipeline_parallel.engine import Action, action_order

order_of = functools.cache(action_order)
"""Torch takes minutes for hundreds of micro-batches."""
SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, kw_only=True)
class BubbleBenchConfig(Options):
    """Bubbles of pipeline schedules"""

    ranks: list[int] = option([2, 4, 8], "pipeline ranks", minimum=2)
    micro_batches: list[int] = option([8, 16], "micro-batches of a step", minimum=1)
    chunks: list[int] = option([2], "stages on each rank, where they are interleaved", minimum=2)
    backward_time: list[float] = option([1.0, 2.0], "time of a backward pass, that of a forward pass being 1")

    def __post_init__(self) -> None:
        super().__post_init__()
        for num_ranks in self.ranks:
            for num_micro_batches in self.micro_batches:
                if num_micro_batches % num_ranks:
                    fail(
                        "micro_batches",
                        num_micro_batches,
                        f"must be a multiple of --ranks ({num_ranks}) for the interleaved schedule",
                        way_out="Change one of the two.",
                    )


@dataclass(frozen=True)
class Bubble:
    """One schedule's bubble, simulated and in theory."""

    schedule: str
    num_ranks: int
    num_chunks: int
    num_micro_batches: int
    backward_time: float
    simulated: float

    @property
    def formula(self) -> float:
        return (self.num_ranks - 1) / (self.num_micro_batches * self.num_chunks)


def main(argv: list[str]) -> int:
    """Simulate and report."""
    sweeps = {"micro_batches": (8, 80, 800)}
    return run("bubble", argv, BubbleBenchConfig, results, description=__doc__, sweeps=sweeps, show=None)


def results(config: BubbleBenchConfig) -> Iterator[Result]:
    """Each schedule at each size, printed in a table."""
    print("schedule     ranks  stages/rank  micro-batches  backward/forward   bubble  (p-1)/(m v)  ratio")
    for backward_time in config.backward_time:
        for schedule in SCHEDULES:
            for num_ranks in config.ranks:
                for num_chunks in config.chunks if schedule == "interleaved" else [1]:
                    for num_micro_batches in config.micro_batches:
                        b = measure(schedule, num_ranks, num_chunks, num_micro_batches, backward_time)
                        print(
                            f"{b.schedule:<12} {b.num_ranks:>5} {b.num_chunks:>12} {b.num_micro_batches:>14} "
                            f"{b.backward_time:>17g} {b.simulated:>8.2%} {b.formula:>12.2%} "
                            f"{b.simulated / b.formula:>6.3f}"
                        )
                        yield counted(
                            b.schedule, OURS, "bubble", "of the computing time", b.simulated, floor=b.formula,
                            ranks=num_ranks, stages_per_rank=num_chunks, micro_batches=num_micro_batches,
                            backward_time=backward_time,
                        )  # fmt: skip


def measure(
    schedule: str, num_ranks: int, num_chunks: int, num_micro_batches: int, backward_time: float = 1.0
) -> Bubble:
    """The bubble of one schedule. A rank's whole forward pass takes 1, so that of one of its stages 1 / v."""
    order = order_of(schedule, num_ranks=num_ranks, num_chunks=num_chunks, num_micro_batches=num_micro_batches)
    times = {"forward": 1.0 / num_chunks, "backward": backward_time / num_chunks}
    computing = num_micro_batches * (1.0 + backward_time)
    simulated = makespan(order, times, num_stages=num_ranks * num_chunks) / computing - 1.0
    return Bubble(schedule, num_ranks, num_chunks, num_micro_batches, backward_time, simulated)


def makespan(order: Sequence[Sequence[Action]], times: dict[str, float], *, num_stages: int) -> float:
    """When the last rank is done, where each does its actions in order, each as soon as its input is there.

    A forward pass needs that of the stage before; a backward pass that of the stage behind, the last stage's its own
    forward pass.
    """
    done: dict[Action, float] = {}
    clocks, positions = [0.0] * len(order), [0] * len(order)
    while any(position < len(actions) for position, actions in zip(positions, order, strict=True)):
        has_moved = False
        for rank, actions in enumerate(order):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                needed = needs(action, num_stages)
                if needed is not None and needed not in done:
                    break
                start = max(clocks[rank], 0.0 if needed is None else done[needed])
                clocks[rank] = done[action] = start + times[action[0]]
                positions[rank] += 1
                has_moved = True
        assert has_moved, "the order is a deadlock"
    return max(clocks)


def needs(action: Action, num_stages: int) -> Action | None:
    """What another rank, or this one before, must have done."""
    kind, stage, micro_batch = action
    if kind == "forward":
        return None if stage == 0 else ("forward", stage - 1, micro_batch)
    if stage == num_stages - 1:
        return ("forward", stage, micro_batch)
    return ("backward", stage + 1, micro_batch)
