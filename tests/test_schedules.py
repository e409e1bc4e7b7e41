"""What the log says about rates is what the optimizer is given, in every style, and goes on so after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.test_resume import load_and_fail, without_timing
from tests.parallel import run_ranks
from tests.runs import tiny_flags, train_tiny
from trimegatron import train
from trimegatron.optim.adamw import FlatAdamW

COMMON = {"train_iters": 8, "lr_decay_iters": 8, "lr_warmup_init": 1e-3, "save_interval": 100}
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 4, "lr_wsd_decay_style": "minus_sqrt"}


def recorded(flags: list[str]) -> list[tuple[float, float]]:
    """(rate, weight decay) of every update of a run."""
    given: list[tuple[float, float]] = []
    step = FlatAdamW.step

    def note(self: FlatAdamW, *, lr: float, weight_decay: float, **rest: object) -> None:
        given.append((lr, weight_decay))
        step(self, lr=lr, weight_decay=weight_decay, **rest)  # type: ignore[arg-type]

    FlatAdamW.step = note  # type: ignore[assignment, method-assign]
    assert train.main(flags) == 0
    return given


@pytest.mark.parametrize(
    "style", [{"lr_decay_style": name} for name in ("constant", "linear", "cosine", "inverse-square-root")] + [WSD]
)
def test_what_is_printed_is_what_the_optimizer_gets(style: dict, corpus: Path, tmp_path: Path):
    ramp = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.8}
    flags = tiny_flags(corpus, metrics_file=tmp_path / "m.jsonl", **COMMON | style | ramp)
    (given,) = run_ranks(1, recorded, flags)
    lines = train_tiny(corpus, metrics=tmp_path / "m.jsonl", **COMMON | style | ramp)
    # A line has the rate after its step, which is that of the next one.
    assert [rate for rate, _ in given] == [1e-3, *(line["learning_rate"] for line in lines[:-1])]
    assert [decay for _, decay in given] == pytest.approx([0.1 * k for k in range(8)])


def test_resume_of_another_schedule(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    straight = train_tiny(corpus, metrics=tmp_path / "a.jsonl", **COMMON | WSD)
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "metrics": tmp_path / "b.jsonl"}
    train_tiny(corpus, exit_interval=5, **where, **COMMON | WSD)
    other = COMMON | WSD | {"lr_wsd_decay_style": "linear", "lr_wsd_decay_iters": 3, "lr_warmup_init": 0.0}
    error = load_and_fail(corpus, capfd, code=4, load=tmp_path / "c", **other)
    assert "wsd_style is minus_sqrt there and linear here" in error
    assert "wsd_samples is 32 there and 24 here" in error and "start_lr is 0.001 there and 0.0 here" in error
    resumed = train_tiny(corpus, **where, **other, use_checkpoint_opt_param_scheduler=True)
    assert without_timing(resumed) == without_timing(straight)
    assert "learning rate: 0.001 to 0.01 over iterations 0 to 2, WSD to" in capfd.readouterr().out
