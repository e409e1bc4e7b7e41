"""What happens when a loss or a gradient is not finite, and runs that do not train at all."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from tests.parallel import run_ranks
from tests.runs import tiny_flags, train_tiny
from trimegatron import garbage, train
from trimegatron.config import parse_train_args
from trimegatron.determinism import deterministic_environment
from trimegatron.errors import ConfigError
from trimegatron.mesh import Mesh
from trimegatron.preflight import with_vocab_size
from trimegatron.tokenizer import build_tokenizer

RUINED = {"lr": 1e30, "min_lr": 0.0, "lr_warmup_iters": 0, "clip_grad": 0.0}
"""The first update makes weights from which every further loss is NaN."""


def run(flags: list[str]) -> int:
    (code,) = run_ranks(1, train.main, flags)
    return code


def test_a_nan_ends_the_run_and_names_its_samples(corpus: Path, capfd: pytest.CaptureFixture):
    assert run(tiny_flags(corpus, **RUINED)) == 5
    error = capfd.readouterr().err
    assert "training diverged at iteration 2 (samples 8 to 15 of the run, documents " in error
    assert f" more of {corpus}): the loss is nan. Lower --lr" in error


def test_skipping_is_counted_and_limited(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """--no-check goes on without touching the weights; the steps skipped in a row are counted across a resume."""
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 100}
    asked = RUINED | {"no_check_for_nan_in_loss_and_grad": True}
    lines = train_tiny(corpus, metrics=tmp_path / "m.jsonl", exit_interval=3, **where, **asked)
    assert [(line["skipped"], line["nan"]) for line in lines] == [(0, 0), (1, 1), (1, 1)]
    assert lines[1]["lm_loss"] is None and lines[1]["grad_norm"] is None  # JSON has no NaN
    second = capfd.readouterr().out.split("iteration        2/")[1].split("\n")[0]
    for part in ("lm loss: NAN |", "grad norm: nan |", "skipped iterations:   1", "nan iterations:   1"):
        assert part in second
    progress = json.loads((tmp_path / "c" / "iter_0000003" / "state.json").read_text())["progress"]
    assert (progress["skipped_in_a_row"], progress["nan_iterations"], progress["scheduled_samples"]) == (2, 2, 8)
    limited = tiny_flags(corpus, metrics_file=tmp_path / "m.jsonl", stop_after_skipped_steps=4, **where, **asked)
    assert run(limited) == 5
    error = capfd.readouterr().err
    assert "diverged at iteration 5 (samples 32 to 39" in error and "4 steps in a row were skipped" in error


@pytest.mark.parametrize(
    ("changes", "iteration", "said"),
    [
        ({"stop_after_skipped_steps": 3}, 3, "3 steps in a row were skipped"),
        ({"initial_loss_scale": 2.0**31, "min_loss_scale": 2.0**30}, 3, "at the smallest loss scale, 1.07374e+09"),
        ({"loss_scale": 2.0**31}, 1, "the gradient norm is not finite. "),
    ],
)
def test_fp16(changes: dict, iteration: int, said: str, corpus: Path, capfd: pytest.CaptureFixture):
    assert run(tiny_flags(corpus, fp16=True, train_iters=4, **changes)) == 5
    error = capfd.readouterr().err
    assert f"diverged at iteration {iteration} (samples" in error and said in error


def state_around_a_skipped_step(flags: list[str]) -> tuple[bool, dict[str, bool], list[float]]:
    """Whether the first step is skipped; which of what it must not touch is as before; the scales after three."""
    config = parse_train_args(flags, world_size=1)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.model.vocab_size)
    config = with_vocab_size(config, tokenizer)
    trainer = train.build_trainer(config, Mesh(torch.device("cpu")), tokenizer, None, lambda line: None)
    optimizer, batches = trainer.optimizer, trainer.loader(trainer.datasets.train, 0)
    watched = {name: getattr(optimizer, name) for name in ("master", "exp_avg", "exp_avg_sq", "low_precision")}
    before = {name: tensor.clone() for name, tensor in watched.items()}
    result = trainer.train_step(batches)
    same = {name: torch.equal(tensor, before[name]) for name, tensor in watched.items()}
    same["step_count"] = optimizer.step_count == 0
    scales = [trainer.scaler.scale]
    for _ in range(2):
        trainer.train_step(batches)
        scales.append(trainer.scaler.scale)
    return result.is_skipped, same, scales


def test_a_skipped_step_touches_nothing(corpus: Path):
    """The first overflow is forgiven (hysteresis 2), the next ones halve the scale."""
    ((is_skipped, same, scales),) = run_ranks(1, state_around_a_skipped_step, tiny_flags(corpus, fp16=True))
    assert is_skipped and all(same.values()), same
    assert scales == [2.0**32, 2.0**31, 2.0**30]


def test_evaluation_alone(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """--skip-train measures what the run measured at this iteration, and leaves the run's files as they are."""
    common = {"save": tmp_path / "c", "save_interval": 4, "eval_iters": 2, "eval_interval": 4, "split": "80,10,10"}
    lines = train_tiny(corpus, metrics=tmp_path / "c" / "metrics.jsonl", train_iters=6, **common)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*") if path.is_file()}
    alone = common | {"skip_train": True, "load": tmp_path / "c", "train_iters": 6}
    at_6 = train_tiny(corpus, metrics=tmp_path / "e.jsonl", **alone)
    assert at_6 == [line for line in lines if "split" in line and line["iteration"] == 6]
    assert [line["split"] for line in at_6] == ["valid", "test"]
    at_4 = train_tiny(corpus, metrics=tmp_path / "f.jsonl", ckpt_step=4, **alone)
    assert at_4[0] == next(line for line in lines if line.get("split") == "valid" and line["iteration"] == 4)
    capfd.readouterr()
    assert run(tiny_flags(corpus, ckpt_step=4, **alone)) == 0
    out = capfd.readouterr().out
    assert "note: --save has no effect: --skip-train saves nothing" in out and "validation loss at iteration 4" in out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("*") if path.is_file()} == before
    assert run(tiny_flags(corpus, split="1,0,0", **{k: v for k, v in alone.items() if k != "split"})) == 2
    assert "--skip-train needs validation or test data" in capfd.readouterr().err


def collections(flags: list[str]) -> list[str]:
    """Every call of gc.collect and every step of a run, in order."""
    calls: list[str] = []
    garbage.gc.collect = lambda generation=2: calls.append(f"collect {generation}") or 0  # type: ignore[assignment]
    step = train.Trainer.train_step

    def note(self, batches):
        calls.append("step" if not gc.isenabled() else "step with gc")
        return step(self, batches)

    train.Trainer.train_step = note
    assert train.main(flags) == 0
    assert gc.isenabled()
    return calls


def test_manual_gc(corpus: Path):
    asked = {"train_iters": 4, "eval_iters": 1, "eval_interval": 3}
    (calls,) = run_ranks(1, collections, tiny_flags(corpus, manual_gc=True, manual_gc_interval=2, **asked))
    everything, young, step = "collect 2", "collect 0", "step"
    assert calls == [everything, step, step, everything, step, everything, young, step, everything]
    (calls,) = run_ranks(1, collections, tiny_flags(corpus, manual_gc=True, no_manual_gc_eval=True, **asked))
    assert calls == [everything, *[step] * 4]
    (calls,) = run_ranks(1, collections, tiny_flags(corpus, **asked))
    assert calls == ["step with gc"] * 4


def is_deterministic(flags: list[str]) -> bool:
    assert train.main(flags) == 0
    return torch.are_deterministic_algorithms_enabled()


def test_deterministic_mode(corpus: Path, tmp_path: Path):
    """Every operator of a step has a deterministic form, else torch would raise; and the bits are those without it."""
    flags = tiny_flags(corpus, metrics_file=tmp_path / "d.jsonl", deterministic_mode=True, train_iters=4)
    assert run_ranks(1, is_deterministic, flags) == [True]
    lines = [json.loads(line)["lm_loss"] for line in (tmp_path / "d.jsonl").read_text().splitlines()]
    plain = train_tiny(corpus, metrics=tmp_path / "p.jsonl", train_iters=4)
    assert lines == [line["lm_loss"] for line in plain]


def test_deterministic_environment():
    assert deterministic_environment({}) == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    mine = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"}
    assert deterministic_environment(mine | {"PATH": "/bin"}) == mine
    with pytest.raises(ConfigError, match=r"NCCL_ALGO \(NVLS\) to be one of Ring, Tree"):
        deterministic_environment({"NCCL_ALGO": "NVLS"})
