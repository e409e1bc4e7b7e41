"""--rampup-batch-size: the batch grows with the samples consumed, in every layout and across a resume alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.test_resume import assert_equal_checkpoints, without_timing
from tests.runs import train_tiny

RAMP = {
    "train_iters": None,
    "lr_decay_iters": None,
    "lr_warmup_iters": None,
    "train_samples": 100,
    "lr_warmup_samples": 16,
    "rampup_batch_size": [4, 4, 60],
    "global_batch_size": 16,
    "save_interval": 100,
}
SIZES = [4, 4, 4, 4, 4, 8, 8, 8, 12, 12, 16, 16]


def test_grows_and_resumes_in_the_middle(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    evaluated = {"eval_iters": 1, "eval_interval": 5}
    straight = train_tiny(corpus, metrics=tmp_path / "a.jsonl", save=tmp_path / "a", **RAMP, **evaluated)
    out = capfd.readouterr().out
    steps = [line for line in straight if "split" not in line]
    assert [line["consumed_samples"] for line in steps] == np.cumsum(SIZES).tolist()
    assert [int(word.split()[0]) for word in out.split("global batch size:")[1:]] == SIZES
    assert "iteration       12/      12" in out and "time left: 0:00" in out

    where = {"metrics": tmp_path / "b.jsonl", "save": tmp_path / "b", "load": tmp_path / "b"}
    train_tiny(corpus, exit_interval=7, **where, **RAMP, **evaluated)
    resumed = train_tiny(corpus, **where, **RAMP, **evaluated)
    assert without_timing(resumed) == without_timing(straight)
    assert_equal_checkpoints(tmp_path / "a" / "iter_0000012", tmp_path / "b" / "iter_0000012")


def test_layouts_and_the_weight_of_a_small_batch(corpus: Path, tmp_path: Path):
    alone = train_tiny(corpus, metrics=tmp_path / "alone.jsonl", **RAMP)
    cut = train_tiny(corpus, world_size=2, metrics=tmp_path / "cut.jsonl", **RAMP)
    # Steps of 4 samples are what a run with that global batch does.
    small = train_tiny(
        corpus, metrics=tmp_path / "s.jsonl", **RAMP | {"rampup_batch_size": None, "global_batch_size": 4}
    )
    for name in ("lm_loss", "grad_norm", "learning_rate"):
        np.testing.assert_allclose([x[name] for x in cut], [x[name] for x in alone], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose([x[name] for x in small[:5]], [x[name] for x in alone[:5]], rtol=1e-6, err_msg=name)
