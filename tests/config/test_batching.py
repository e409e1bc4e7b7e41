"""The batch ramp against Megatron's rule written out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.train_line import read
from trimegatron.config.batching import BatchSizes


def test_always_the_same() -> None:
    sizes = BatchSizes(8, 8)
    assert [sizes.at(consumed) for consumed in (0, 8, 1000)] == [8, 8, 8]
    assert sizes.sizes() == [8]
    assert (sizes.num_steps(47), sizes.within(47), sizes.iteration_at(20)) == (5, (5, 40), 2.5)


def test_ramp() -> None:
    """From 4 by 4 to 16 over 60 samples: three parts of 20, of which the first holds 5 steps of 4."""
    sizes = BatchSizes(16, 4, 4, 60)
    steps, consumed = [], 0
    while consumed < 100:
        steps.append(sizes.at(consumed))
        consumed += steps[-1]
    # parts begin at 20 and 40; a step that began before an end keeps its size
    assert steps == [4, 4, 4, 4, 4, 8, 8, 8, 12, 12, 16, 16]
    assert sizes.at(60) == sizes.at(61) == sizes.at(10**9) == 16
    assert sizes.sizes() == [4, 8, 12, 16]
    assert sizes.within(68) == (10, 68)
    assert sizes.within(83) == (10, 68)
    assert sizes.within(84) == (11, 84)
    assert sizes.within(30) == (6, 28)
    assert sizes.iteration_at(32) == 6.5
    assert sizes.iteration_at(92) == 11.5


@pytest.mark.parametrize("ramp", [(100, 10, 30, 1000), (512, 32, 32, 5859), (7, 1, 2, 100), (64, 8, 8, 3)])
def test_steps_add_up(ramp: tuple[int, int, int, int]) -> None:
    sizes = BatchSizes(*ramp)
    full, start, increment, samples = ramp
    consumed = steps = 0
    while consumed < 3 * samples:
        part = int(consumed / (samples / ((full - start) / increment)))
        assert sizes.at(consumed) == (full if consumed > samples else start + part * increment)
        consumed, steps = consumed + sizes.at(consumed), steps + 1
        assert sizes.within(consumed) == (steps, consumed)


def test_resolved(work: Path) -> None:
    extra = "--train-samples 100 --global-batch-size 16 --rampup-batch-size 4 4 60 --lr-warmup-samples 30"
    done = read(extra, without="--train-iters")
    assert (done.config.training.train_iters, done.config.num_samples) == (12, 100)
    assert [done.config.micro_batches_of(size) for size in (4, 12)] == [1, 3]
    assert done.config.num_micro_batches == 4
    lines = [" ".join(line.split()) for line in done.text().splitlines()]
    for expected in (
        "rampup-batch-size 4 4 60 samples command line",
        "batch ramp: 4 samples, then 4 more at a time, 16 from sample 60 on, iteration 9.333333333",
        "whole run: 12 iterations, 100 samples, 3,200 tokens; 512 tokens a step",
        "warm-up ends: iteration 6.25 sample 30 learning rate 0.001",
    ):
        assert expected in lines
