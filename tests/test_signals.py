"""A signal to any one rank, at any time, or a stop file: all ranks save at the same step and leave with 143."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import free_port, run_ranks
from tests.runs import read_metrics, tensors_of, tiny_flags, train_tiny
from trimegatron import stopping, train
from trimegatron.checkpoint import saver
from trimegatron.feed import Feed
from trimegatron.launch import children_of
from trimegatron.mesh import Mesh
from trimegatron.trainer import Trainer

COMMON: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 12, "lr_decay_iters": 12, "save_interval": 100,
    "eval_interval": 4, "eval_iters": 1, "num_workers": 1,
}  # fmt: skip


def kill_self_and_workers(name: str, times: int = 1) -> None:
    """As a scheduler does: the rank and its data workers all get it."""
    for _ in range(times):
        for pid in (*children_of(os.getpid()), os.getpid()):
            os.kill(pid, signal.Signals[name])


def before(owner: Any, name: str, act: Callable[..., None]) -> Callable[[], None]:
    """Have ``act`` run before a function; what is returned takes it back."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        act(*args)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)
    return lambda: setattr(owner, name, original)


def in_step(iteration: int, act: Callable[[], None]) -> Callable[[], Callable[[], None]]:
    return lambda: before(Trainer, "train_step", lambda self, _: act() if self.progress.iteration == iteration else 0)


CASES: dict[str, tuple[dict[str, Any], Callable[[], Callable[[], None]], int]] = {
    # name: changes, what the signalled rank does, the iteration at which all stop
    "a step": ({}, in_step(4, lambda: kill_self_and_workers("SIGUSR1")), 5),
    "twice": ({}, in_step(6, lambda: kill_self_and_workers("SIGTERM", times=2)), 7),
    "another": ({"exit_signal": "SIGUSR2"}, in_step(1, lambda: kill_self_and_workers("SIGUSR2")), 2),
    "an evaluation": (
        {},
        lambda: before(Feed, "count_bytes", lambda self, _: kill_self_and_workers("SIGTERM")),
        4,
    ),
    "a save": (
        {"save_interval": 3},
        lambda: before(saver, "save_pieces", lambda *_: kill_self_and_workers("SIGTERM")),
        3,
    ),
    "a save beside training": (
        {"save_interval": 3, "async_save": True},
        lambda: before(saver.Saver, "save", lambda *_: kill_self_and_workers("SIGTERM")),
        4,
    ),
}


def stopped_at(corpus: Path, folder: Path, ports: list[int]) -> list[int]:
    """Each case in turn: rank 1 is signalled. The exit codes."""
    codes = []
    for (name, (changes, act, _)), port in zip(CASES.items(), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        restore = act() if os.environ["RANK"] == "1" else lambda: None
        codes.append(train.main(tiny_flags(corpus, **COMMON | changes | {"save": folder / name})))
        restore()
    return codes


def test_all_ranks_stop_at_the_same_step(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    ranks = run_ranks(2, stopped_at, corpus, tmp_path, [free_port() for _ in CASES])
    assert ranks == [[143] * len(CASES)] * 2
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "error" not in err
    for name, (_, _, iteration) in CASES.items():
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == str(iteration), name
        assert [path.name for path in (tmp_path / name).glob(".*")] == [], name
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [line["iteration"] for line in lines if "split" not in line] == list(range(1, iteration + 1)), name
        # An evaluation that is met by a signal is finished.
        assert [line["iteration"] for line in lines if "split" in line] == [4] * (iteration // 4), name
        assert f"a signal came: stopping at iteration {iteration}" in out
    assert err.count("rank 1: SIGTERM: the run will save and stop") == 4

    # Resumed, it is the run that was not stopped.
    straight = tmp_path / "straight"
    train_tiny(corpus, world_size=2, metrics=straight / "metrics.jsonl", save=straight, **COMMON)
    resumed = tmp_path / "twice"
    train_tiny(corpus, world_size=2, metrics=resumed / "metrics.jsonl", save=resumed, load=resumed, **COMMON)
    mine, theirs = (tensors_of(folder / "iter_0000012") for folder in (resumed, straight))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    losses = [[line["lm_loss"] for line in read_metrics(folder / "metrics.jsonl")] for folder in (resumed, straight)]
    assert losses[0] == losses[1]


def stopped_early(corpus: Path, folder: Path, ports: list[int]) -> list[int]:
    """A signal to rank 1 while the data is prepared, while the model is built, and in the evaluation before the first
    step; the stop file; the time that is over on rank 1; a signal to rank 0 in the last evaluation of all."""
    stopping.LOOK_SECONDS = 0.0
    rank = os.environ["RANK"]
    flags = COMMON | {"eval_at_start": True, "save": folder / "early"}
    codes = []

    def run(restore: Callable[[], None] | None, **changes: Any) -> None:
        os.environ["MASTER_PORT"] = str(ports[len(codes)])
        codes.append(train.main(tiny_flags(corpus, **flags | changes)))
        if restore is not None:
            restore()

    def stay(*_: Any) -> None:
        kill_self_and_workers("SIGTERM")
        time.sleep(30)  # the signal ends this

    def signalled(*_: Any) -> None:
        kill_self_and_workers("SIGTERM")

    def leave_file() -> None:
        (folder / "file" / "STOP").touch()

    run(before(train, "on_every_rank", lambda *_: signalled()) if rank == "1" else None)
    run(before(train, "build_model", stay) if rank == "1" else None)
    run(before(Feed, "count_bytes", signalled) if rank == "1" else None)
    run(in_step(3, leave_file)() if rank == "1" else None, save=folder / "file")
    run(None, save=folder / "time", exit_duration_in_mins=1e-6 if rank == "1" else 1000)
    is_test = before(Trainer, "evaluate", lambda self, split, *_: signalled() if split == "test" else None)
    run(is_test, save=folder / "end", train_iters=3, split="80,10,10")
    return codes


def test_early_and_late(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    (tmp_path / "file").mkdir()
    assert (
        run_ranks(2, stopped_early, corpus, tmp_path, [free_port() for _ in range(6)])
        == [[143, 143, 143, 143, 0, 0]] * 2
    )
    out, err = capfd.readouterr()
    assert "Traceback" not in err and "error" not in err
    assert err.count("stopped by SIGTERM before the first step; there is nothing to save") == 2
    assert not list((tmp_path / "early").glob("*iter_*"))
    assert f"{tmp_path}/file/STOP is there: stopping at iteration 4" in out
    assert json.loads((tmp_path / "file" / "iter_0000004" / "state.json").read_text())["progress"]["iteration"] == 4
    assert not (tmp_path / "file" / "STOP").exists()
    assert "--exit-duration-in-mins 1000.0: stopping at iteration 1" in out
    assert [line["split"] for line in read_metrics(tmp_path / "end" / "metrics.jsonl") if "split" in line] == [
        "valid", "valid", "test",
    ]  # fmt: skip


def test_the_stop_file_lasts_for_all_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torchrun --max-restarts takes 143 for a failure; a run that it starts again is to stop again."""
    (tmp_path / "STOP").touch()

    class Trap:
        received = None

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    flags = tiny_flags(tmp_path / "no", save=tmp_path, save_interval=1)
    monkeypatch.setattr("trimegatron.config.train_args.check_machine", lambda *_, **__: [])
    config = train.read_train_args(flags, world_size=1).config
    for restart, is_left in ((0, True), (1, True), (2, False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        asked = stopping.Stopping(config, looks_for_file=True, trap=Trap(), say=lambda _: None)  # type: ignore
        asked.heed(asked.wishes())
        assert asked.stops_at(1) and asked.exit_code == 143
        asked.take_file_away()
        assert (tmp_path / "STOP").exists() is is_left


def test_a_mesh_of_one_needs_no_agreement():
    assert Mesh(torch.device("cpu")).gather("x") == ["x"]
