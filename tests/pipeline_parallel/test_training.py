"""What every stage must agree on: the tied word table, an overflow, an error."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.pipelining  # (here once, not in each forked rank)

from tests.parallel import run_ranks
from tests.runs import read_metrics, tiny_flags, train_each
from trimegatron import train
from trimegatron.errors import ConfigError, DataError
from trimegatron.feed import Feed
from trimegatron.mesh import init_mesh
from trimegatron.model.gpt import GPTStage
from trimegatron.trainer import Trainer

PP2 = {"pipeline_model_parallel_size": 2}
WORDS = "embedding.word_embeddings.weight"


def word_tables(flags: list[str]) -> list[torch.Tensor]:
    """Train; this rank's word table with its moments and master weights."""
    trained: list[Trainer] = []
    train_, Trainer.train = Trainer.train, lambda self: (train_(self), trained.append(self))[0]  # type: ignore
    assert train.main(flags) == 0
    (trainer,) = trained
    optimizer, (piece,) = trainer.optimizer, [piece for piece in trainer.buffer.slices if piece.name == WORDS]
    return [
        piece.view(t).clone()
        for t in (trainer.buffer.params, optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq)
    ]


@pytest.mark.parametrize("precision", [{}, {"bf16": True, "train_iters": 5, "lr_decay_iters": 5}], ids=["fp32", "bf16"])
def test_the_tied_word_tables_stay_equal(precision: dict, corpus: Path, tmp_path: Path):
    """20 steps with dropout at (pp2, dp2): the same bits on both stages, close to the table of a single process."""
    run = {"metrics_file": tmp_path / "m.jsonl", **precision}
    ranks = run_ranks(4, word_tables, tiny_flags(corpus, **PP2, **run))
    (alone,) = run_ranks(1, word_tables, tiny_flags(corpus, **run))
    for rank in ranks[1:]:
        for mine, first in zip(rank, ranks[0], strict=True):
            assert torch.equal(mine, first)
    if not precision:
        torch.testing.assert_close(ranks[0][0], alone[0], rtol=0, atol=1e-4)
    assert (ranks[0][0] - alone[0]).float().abs().mean() < 1e-3


def overflowing(flags: list[str]) -> list[Any]:
    """Train where the second step's gradient of one parameter of the last stage is infinite; what each step did to this
    rank's weights.
    """
    changed: list[bool] = []
    step = Trainer.train_step

    def train_step(self: Trainer, batches: Any) -> Any:
        before = self.buffer.params.clone()
        hooks = [
            p.register_hook(lambda grad: grad * float("inf"))
            for name, p in self.model.named_parameters()
            if name == "layers.1.mlp.dense_4h_to_h.bias" and len(changed) == 1
        ]
        result = step(self, batches)
        for hook in hooks:
            hook.remove()
        changed.append(not torch.equal(before, self.buffer.params))
        return result

    Trainer.train_step = train_step  # type: ignore[method-assign]
    return [train.main(flags), changed]


def test_an_overflow_on_one_stage_skips_the_step_on_all(corpus: Path, tmp_path: Path):
    flags = tiny_flags(
        corpus, fp16=True, initial_loss_scale=1024, hysteresis=1, train_iters=4, lr_decay_iters=4, lr_warmup_iters=0,
        metrics_file=tmp_path / "m.jsonl", **PP2,
    )  # fmt: skip
    assert run_ranks(2, overflowing, flags) == [[0, [True, False, True, True]]] * 2
    lines = read_metrics(tmp_path / "m.jsonl")
    assert [line["skipped"] for line in lines] == [0, 1, 0, 0]
    assert [line["loss_scale"] for line in lines] == [1024, 512, 512, 512]


def test_half_precision_is_close_to_one_process(corpus: Path, tmp_path: Path):
    few = {"train_iters": 5, "lr_decay_iters": 5}
    runs = {"bf16": {"bf16": True, **few}, "fp16": {"fp16": True, "initial_loss_scale": 1024, **few}}
    alone = train_each(corpus, tmp_path, {f"{k} alone": v for k, v in runs.items()})
    pipeline = train_each(corpus, tmp_path, {k: v | PP2 for k, v in runs.items()}, world_size=2)
    for name in runs:
        for key in ("lm_loss", "grad_norm"):
            mine, theirs = ([line[key] for line in x] for x in (pipeline[name], alone[f"{name} alone"]))
            assert mine == pytest.approx(theirs, rel=1e-2 if key == "lm_loss" else 5e-2)


def failing(flags: list[str], kind: str, failing_rank: int) -> list[Any]:
    """Train; one rank fails at its fifth micro-batch, in the data or within a stage."""
    calls: list[int] = []

    def fail_at_fifth(rank: int, error: Exception) -> None:
        calls.append(rank)
        if rank == failing_rank and len(calls) == 5:
            raise error

    if kind == "data":
        take = Feed.take

        def taken(self: Feed, batches: Any, num_micro_batches: int) -> Any:
            for batch in take(self, batches, num_micro_batches):
                fail_at_fifth(self.mesh.world.rank, DataError("the data is broken"))
                yield batch

        Feed.take = taken  # type: ignore[method-assign]
    else:
        forward = GPTStage.forward

        def failing_forward(self: GPTStage, *args: Any, **kwargs: Any) -> Any:
            fail_at_fifth(int(self.is_last), ValueError("a stage is broken"))
            return forward(self, *args, **kwargs)

        GPTStage.forward = failing_forward  # type: ignore[method-assign]
    started = time.monotonic()
    return [train.main(flags), time.monotonic() - started]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_one_ranks_error_ends_all_with_one_message(
    is_interleaved: bool, rank: int, corpus: Path, capfd: pytest.CaptureFixture[str]
):
    """It alone meets the error: rank 3, the last stage of the second replica, or rank 0, which holds the store."""
    chunks = {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1} if is_interleaved else {}
    results = run_ranks(4, failing, tiny_flags(corpus, **PP2, **chunks), "data", rank)
    assert [code for code, _ in results] == [3] * 4
    assert all(seconds < 20 for _, seconds in results)
    error = capfd.readouterr().err
    assert error.count("the data is broken") == 1 and "Traceback" not in error and "Schedule" not in error


@pytest.mark.parametrize("stage", [0, 1])
def test_an_error_within_a_stage(stage: int, corpus: Path, capfd: pytest.CaptureFixture[str]):
    """Nobody foresaw it: that rank alone shows where, the others just end."""
    results = run_ranks(2, failing, tiny_flags(corpus, **PP2), "stage", stage)
    assert [code for code, _ in results] == [1, 1]
    assert all(seconds < 20 for _, seconds in results)
    error = capfd.readouterr().err
    assert error.count("ValueError: a stage is broken") == 1
    assert "failing_forward" in error and "onnection" not in error


def test_gloo_does_not_send_between_gpus(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"--distributed-backend \(gloo\) cannot send"):
        init_mesh(torch.device("cuda"), pipeline_parallel_size=2, backend="gloo")
