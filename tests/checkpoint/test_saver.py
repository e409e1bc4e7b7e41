"""Saves: which are kept, what a save that fails does, beside training, and on nodes with disks of their own."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.parallel import free_port, run_ranks
from tests.runs import tensors_of, tiny_flags
from trimegatron import train
from trimegatron.checkpoint import saver
from trimegatron.checkpoint.directory import (
    LIFE_OF_A_MARK,
    clear_leftovers,
    damage_in,
    find_checkpoint,
    outdated,
    problem_with,
)
from trimegatron.checkpoint.snapshot import Snapshot
from trimegatron.checkpoint.storage import Piece

COMMON: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 8, "lr_decay_iters": 12, "save_interval": 2,
    "log_interval": 100, "use_distributed_optimizer": True,
}  # fmt: skip


def saved(folder: Path) -> list[int]:
    """Iterations of the complete checkpoints in a folder, each verified; nothing else may lie there."""
    for path in folder.iterdir():
        if path.is_dir():
            assert problem_with(path) is None and damage_in(path) is None
    assert not list(folder.glob(".*"))
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*"))


def in_turn(corpus: Path, runs: list[tuple[int, str | None, dict[str, Any]]]) -> list[int]:
    """Train once for each (port, name of a function here that breaks something, changes); the exit codes."""
    codes = []
    for port, breaks, changes in runs:
        os.environ["MASTER_PORT"] = str(port)
        flags = tiny_flags(corpus, **COMMON | changes)
        rank = os.environ["RANK"]
        originals = {name: getattr(saver, name) for name in ("save_pieces", "publish")}
        if breaks is not None:
            globals()[breaks](int(rank))
        codes.append(train.main([word.replace("{rank}", rank) for word in flags]))
        saver.save_pieces, saver.publish = originals["save_pieces"], originals["publish"]
        saver.shutil.disk_usage = shutil_disk_usage
    return codes


shutil_disk_usage = shutil.disk_usage


def train_in_turn(corpus: Path, *runs: tuple[str | None, dict[str, Any]]) -> list[int]:
    """The exit code of each run, which both ranks have left with."""
    ranks = run_ranks(2, in_turn, corpus, [(free_port(), *run) for run in runs])
    assert ranks[0] == ranks[1]
    return ranks[0]


def fill_the_disk(rank: int) -> None:
    """Rank 1 cannot write what it has of iteration 4."""
    write = saver.save_pieces
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limited(folder: Path, *args: Any, **options: Any) -> Path:
        if rank != 1 or "0000004" not in folder.name:
            return write(folder, *args, **options)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            return write(folder, *args, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    saver.save_pieces = limited


class Usage(NamedTuple):
    free: int


def leave_no_room(rank: int) -> None:
    """The disk has room for one rank's part, but not for both; nothing may be written."""
    saver.shutil.disk_usage = lambda _: Usage(saver.SMALL_FILES + 200_000)  # type: ignore

    def never(*_: Any, **__: Any) -> Path:
        raise AssertionError("written without room")

    saver.save_pieces = never  # type: ignore


def flip_a_byte(rank: int) -> None:
    """What was written of iteration 8 changes once it has been hashed."""
    finish = saver.publish

    def damaging(temporary: Path, final: Path, entries: dict[str, Any]) -> None:
        finish(temporary, final, entries)
        if "0000008" in final.name:
            shard = final / "shard-00001.safetensors"
            shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")

    saver.publish = damaging


def test_what_is_kept(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    codes = train_in_turn(
        corpus,
        (None, {"save": tmp_path / "new" / "deep", "keep_last": 2}),
        (None, {"save": tmp_path / "retain", "save_retain_interval": 4, "train_iters": 10}),
        (None, {"save": tmp_path / "all", "train_iters": 6}),
        ("flip_a_byte", {"save": tmp_path / "damaged", "keep_last": 1, "on_save_error": "stop"}),
        (None, {"save": tmp_path / "node{rank}" / "c"}),
    )
    assert codes == [0, 0, 0, 4, 2]
    assert saved(tmp_path / "new" / "deep") == [6, 8]
    assert saved(tmp_path / "retain") == [4, 8, 10]
    assert saved(tmp_path / "all") == [2, 4, 6]
    err = capfd.readouterr().err
    assert "iter_0000008/shard-00001.safetensors is damaged" in err and "older checkpoints are kept" in err
    assert damage_in(tmp_path / "damaged" / "iter_0000006") is None
    # Two nodes with disks of their own: nothing starts.
    assert "/c) must be one folder for all ranks" in err and "1 of 2, the first of them rank 1, see another" in err
    assert not list((tmp_path / "node0" / "c").iterdir()) and not (tmp_path / "node1").exists()


def test_a_save_that_fails(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """It leaves nothing behind; the run goes on or stops; the last one must succeed."""
    cases = {
        name: (breaks, {"save": tmp_path / name, **changes})
        for name, breaks, changes in (
            ("on", "fill_the_disk", {}),
            ("stop", "fill_the_disk", {"on_save_error": "stop"}),
            ("last", "fill_the_disk", {"train_iters": 4}),
            ("room", "leave_no_room", {"train_iters": 2}),
            ("beside", "fill_the_disk", {"async_save": True}),
            ("beside and stop", "fill_the_disk", {"async_save": True, "on_save_error": "stop"}),
            ("beside and last", "fill_the_disk", {"async_save": True, "train_iters": 4}),
        )
    }
    codes = train_in_turn(corpus, *cases.values())
    assert dict(zip(cases, codes, strict=True)) == {
        "on": 0, "stop": 4, "last": 4, "room": 4, "beside": 0, "beside and stop": 4, "beside and last": 4,
    }  # fmt: skip
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    for name, iterations in (("on", [2, 6, 8]), ("stop", [2]), ("last", [2]), ("room", []), ("beside", [2, 6, 8])):
        assert saved(tmp_path / name) == iterations
    assert saved(tmp_path / "beside and stop") == saved(tmp_path / "beside and last") == [2]
    for name in ("on", "beside"):
        (line,) = (line for line in out.splitlines() if f"{tmp_path}/{name}/iter_0000004 could not be saved" in line)
        assert "rank 1: " in line and "The run goes on (--on-save-error continue)" in line
    for name in ("stop", "last", "beside and stop", "beside and last"):
        assert err.count(f"error: {tmp_path}/{name}/iter_0000004 could not be saved: rank 1: ") == 1
    assert "room/iter_0000002 could not be saved: rank 0: it needs" in err and "0.03 GB free" in err


def beside_training(corpus: Path, folder: Path, ports: list[int]) -> list[Any]:
    """Writing takes until the run has gone on; then with the process killed meanwhile. What the thread saw."""
    write, seen = saver.save_pieces, []
    steps: list[int] = []
    train_step = train.Trainer.train_step

    def step(self: Any, batches: Any) -> Any:
        steps.append(self.progress.iteration)
        return train_step(self, batches)

    def slowly(*args: Any, **options: Any) -> Path:
        seen.append(threading.current_thread() is not threading.main_thread())
        end = time.monotonic() + 20
        while len(steps) < 3:  # the first save, after two steps, takes until the third
            assert time.monotonic() < end
            time.sleep(0.01)
        return write(*args, **options)

    train.Trainer.train_step, saver.save_pieces = step, slowly  # type: ignore
    flags = tiny_flags(corpus, **COMMON | {"save": folder / "a", "async_save": True, "bf16": True})
    return [train.main(flags), all(seen), steps]


def test_beside_training(corpus: Path, tmp_path: Path):
    """The same checkpoints as those for which training waits, though it goes on while they are written."""
    train_in_turn(corpus, (None, {"save": tmp_path / "s", "bf16": True}))
    for code, in_thread, steps in run_ranks(2, beside_training, corpus, tmp_path, [free_port()]):
        assert (code, in_thread, steps) == (0, True, list(range(8)))
    assert saved(tmp_path / "a") == saved(tmp_path / "s") == [2, 4, 6, 8]
    for iteration in (2, 8):
        mine, theirs = (tensors_of(tmp_path / n / f"iter_000000{iteration}") for n in "as")
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.skipif(sys.platform != "linux", reason="who takes which memory when is the system's")
def test_the_memory_of_saves_beside_training():
    """A copy of its own; the same memory each time, whose pages a process forked meanwhile does not take along."""
    weight = torch.arange(1 << 20, dtype=torch.float32).view(1 << 10, 1 << 10).requires_grad_()
    pieces = {"a": Piece(weight, (2048, 1024), (1024, 0)), "b": Piece(weight, (1024, 1024), (0, 0), is_copy=True)}
    state: Any = None
    buffers: dict[str, torch.Tensor] = {}
    first = Snapshot(pieces, state).on_host(buffers).pieces
    assert first.keys() == {"a"} and torch.equal(first["a"].tensor, weight) and first["a"].offsets == (1024, 0)
    with torch.no_grad():
        weight += 1
    assert torch.equal(first["a"].tensor, weight - 1)
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    second = Snapshot(pieces, state).on_host(buffers).pieces
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    forked.kill()
    forked.join()
    assert torch.equal(second["a"].tensor, weight) and second["a"].tensor.data_ptr() == first["a"].tensor.data_ptr()
    assert faults < weight.nbytes / resource.getpagesize() / 2


def die_while_writing(flags: list[str]) -> int:
    write = saver.save_pieces

    def dying(folder: Path, *args: Any, **options: Any) -> Path:
        written = write(folder, *args, **options)
        if "0000004" in folder.name:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    saver.save_pieces = dying  # type: ignore
    return train.main(flags)


def test_a_kill_beside_training(corpus: Path, tmp_path: Path):
    flags = tiny_flags(corpus, **COMMON | {"save": tmp_path, "async_save": True})
    process = multiprocessing.get_context("fork").Process(target=die_while_writing, args=(flags,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / ".iter_0000004.tmp").exists()
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002" and damage_in(tmp_path / "iter_0000002") is None
    assert run_ranks(1, train.main, [*flags, "--load", str(tmp_path)]) == [0]
    assert saved(tmp_path) == [2, 4, 6, 8]


def test_leftovers(tmp_path: Path):
    """What only a killed run can have left goes, and what a run that starts now is looking for stays."""
    dead = [".iter_0000004.tmp", ".metrics.jsonl.12.tmp", ".latest_checkpointed_iteration.txt.12.tmp", ".seen-old"]
    alive = [".seen-new", "metrics.jsonl", "iter_0000002", ".notes.tmp"]
    for name in (*dead, *alive):
        (tmp_path / name).mkdir() if "iter_0" in name else (tmp_path / name).touch()
    (tmp_path / ".iter_0000004.tmp" / "shard-00000.safetensors").touch()
    hours_ago = time.time() - 2 * LIFE_OF_A_MARK
    os.utime(tmp_path / ".seen-old", (hours_ago, hours_ago))
    clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(alive)


def complete(root: Path, *iterations: int) -> Callable[..., list[int]]:
    for iteration in iterations:
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text('{"files": {}}')
    return lambda newest, *rule: [int(f.name[-7:]) for f in outdated(root / f"iter_{newest:07d}", *rule)]


def test_outdated(tmp_path: Path):
    of = complete(tmp_path, 2, 4, 6, 8, 10)
    assert of(10, 1, None) == [8, 6, 4, 2]
    assert of(10, 3, None) == [4, 2]
    assert of(10, 1, 4) == [6, 2]
    assert of(6, 1, None) == [4, 2]  # 8 and 10 are another branch
    (tmp_path / "iter_0000008" / "manifest.json").unlink()
    assert of(10, 2, None) == [4, 2]  # 8 is not complete and does not count
