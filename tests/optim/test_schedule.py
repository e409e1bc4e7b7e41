"""Learning rate, weight decay and loss scale against the rules written out."""

from __future__ import annotations

import math

import pytest

from trimegatron.optim.scaler import DynamicLossScaler
from trimegatron.optim.schedule import LearningRateSchedule, WeightDecaySchedule


def test_warm_up_and_cosine():
    schedule = LearningRateSchedule(max_lr=1.0, min_lr=0.1, warmup_samples=10, decay_samples=110, style="cosine")
    assert schedule(0) == 0.0
    assert schedule(5) == 0.5
    assert schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.55)
    assert schedule(35) == pytest.approx(0.1 + 0.9 * (math.cos(math.pi / 4) + 1) / 2)
    assert schedule(110) == pytest.approx(0.1)
    assert schedule(10_000) == 0.1


def test_linear_and_constant():
    linear = LearningRateSchedule(max_lr=1.0, min_lr=0.0, warmup_samples=0, decay_samples=100, style="linear")
    assert [linear(s) for s in (0, 25, 100, 101)] == [1.0, 0.75, 0.0, 0.0]
    constant = LearningRateSchedule(max_lr=1.0, min_lr=0.0, warmup_samples=4, decay_samples=100, style="constant")
    assert [constant(s) for s in (0, 1, 4, 1000)] == [0.0, 0.25, 1.0, 1.0]


def test_weight_decay_ramps():
    assert WeightDecaySchedule(0.1, 0.1, 100, "constant")(3) == 0.1
    assert WeightDecaySchedule(0.0, 1.0, 100, "linear")(25) == 0.25
    cosine = WeightDecaySchedule(0.0, 1.0, 100, "cosine")
    assert [cosine(s) for s in (0, 50, 100)] == pytest.approx([0.0, 0.5, 1.0])
    assert cosine(25) == pytest.approx((math.cos(math.pi * 0.75) + 1) / 2)


def test_loss_scale_follows_megatrons_rules():
    """Two overflows are needed for the first halving, later ones halve at once; only a full clean window forgives."""
    scaler = DynamicLossScaler(scale=2.0**32, window=4, hysteresis=2)
    seen = []
    for overflowed in [True, True, True, False, False, True, False, False, False, False, True, True]:
        scaler.update(overflowed)
        seen.append(math.log2(scaler.scale))
    assert seen == [32, 31, 30, 30, 30, 29, 29, 29, 29, 30, 30, 29]


def test_loss_scale_stops_at_its_minimum_and_resumes():
    scaler = DynamicLossScaler(scale=4.0, min_scale=1.0, window=2, hysteresis=1)
    for _ in range(5):
        scaler.update(True)
    assert scaler.scale == 1.0
    scaler.update(False)
    resumed = DynamicLossScaler(scale=4.0, window=2, hysteresis=1)
    resumed.load(scaler.state())
    resumed.update(False)
    assert resumed.scale == 2.0
