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


def test_warm_up_from_above_zero() -> None:
    rate = schedule(start_lr=0.2, warmup_samples=10).learning_rate
    assert [rate(s) for s in (0, 5, 10)] == pytest.approx([0.2, 0.6, 1.0])


def test_inverse_square_root() -> None:
    rate = schedule(style="inverse-square-root", warmup_samples=4, min_lr=0.25).learning_rate
    assert [rate(s) for s in (2, 4, 16, 25, 64, 100)] == pytest.approx([0.5, 1.0, 0.5, 0.4, 0.25, 0.25])
    assert rate(101) == 0.25
    without_warm_up = schedule(style="inverse-square-root").learning_rate
    assert [without_warm_up(s) for s in (0, 1, 9, 100, 101)] == pytest.approx([1.0, 1.0, 1 / 3, 0.1, 0.0])


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),  # how much is left of (lr - min_lr) after these parts of the decay
    [
        ("linear", 0.75, 0.5),
        ("cosine", 0.8535533905932737, 0.5),
        ("exponential", 0.681792830507429, 0.41421356237309515),  # 2 / 2^(1/4) - 1, sqrt 2 - 1
        ("minus_sqrt", 0.5, 0.2928932188134524),
    ],
)
def test_warm_up_stable_decay(shape: str, quarter: float, half: float) -> None:
    """10 samples up, the last 40 of 110 down from 1.1 to 0.1."""
    rate = schedule(
        lr=1.1, min_lr=0.1, style="WSD", warmup_samples=10, decay_samples=110, wsd_style=shape, wsd_samples=40
    ).learning_rate
    assert [rate(s) for s in (0, 5, 10, 11, 60, 70)] == pytest.approx([0.0, 0.55, 1.1, 1.1, 1.1, 1.1])
    assert [rate(s) for s in (80, 90, 110)] == pytest.approx([0.1 + quarter, 0.1 + half, 0.1])
    assert rate(111) == 0.1


def test_weight_decay_ramps() -> None:
    assert schedule(start_weight_decay=0.1, end_weight_decay=0.1).weight_decay(3) == 0.1
    assert schedule(weight_decay_style="linear").weight_decay(25) == 0.25
    cosine = schedule(weight_decay_style="cosine")
    assert [cosine.weight_decay(s) for s in (0, 50, 100, 200)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert cosine.weight_decay(25) == pytest.approx((math.cos(math.pi * 0.75) + 1) / 2)
