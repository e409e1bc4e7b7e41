"""The loss scale against Megatron's rules."""

from __future__ import annotations

import math

from trimegatron.optim.scaler import DynamicLossScaler


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
