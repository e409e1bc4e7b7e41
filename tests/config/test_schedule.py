"""Learning rate and weight decay against the rules written out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trimegatron.config.schedule import Schedule


def schedule(**changes: Any) -> Schedule:
    fields: dict[str, Any] = {
        "lr": 1.0,
        "min_lr": 0.0,
        "style": "linear",
        "warmup_samples": 0,
        "decay_samples": 100,
        "total_samples": 100,
        "start_weight_decay": 0.0,
        "end_weight_decay": 1.0,
        "weight_decay_style": "constant",
    }
    return Schedule(**fields | changes)


def test_warm_up_and_cosine() -> None:
    rate = schedule(min_lr=0.1, warmup_samples=10, decay_samples=110, style="cosine").learning_rate
    assert [rate(s) for s in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert rate(60) == pytest.approx(0.55)
    assert rate(35) == pytest.approx(0.1 + 0.9 * (math.cos(math.pi / 4) + 1) / 2)
    assert rate(110) == pytest.approx(0.1)
    assert rate(10_000) == 0.1


def test_linear_and_constant() -> None:
    assert [schedule().learning_rate(s) for s in (0, 25, 100, 101)] == [1.0, 0.75, 0.0, 0.0]
    constant = schedule(style="constant", warmup_samples=4)
    assert [constant.learning_rate(s) for s in (0, 1, 4, 1000)] == [0.0, 0.25, 1.0, 1.0]


def test_weight_decay_ramps() -> None:
    assert schedule(start_weight_decay=0.1, end_weight_decay=0.1).weight_decay(3) == 0.1
    assert schedule(weight_decay_style="linear").weight_decay(25) == 0.25
    cosine = schedule(weight_decay_style="cosine")
    assert [cosine.weight_decay(s) for s in (0, 50, 100, 200)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert cosine.weight_decay(25) == pytest.approx((math.cos(math.pi * 0.75) + 1) / 2)
