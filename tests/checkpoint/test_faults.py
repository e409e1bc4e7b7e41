"""Kills, full disks and damaged files: there is always a complete checkpoint, and the end is that of the run which
nothing happened to, to the bit.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_resume import without_timing
from tests.parallel import free_port, rank_environment, run_ranks
from tests.runs import read_metrics, tiny_flags, train_tiny
from trimegatron import train
from trimegatron.checkpoint.compare import differences
from trimegatron.checkpoint.contents import faults
from trimegatron.checkpoint.directory import checkpoint_folder, find_checkpoint, tracked_iteration

STEPS = 12
TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": STEPS,
    "save_interval": 2,
}


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("straight")
    train_tiny(corpus, metrics=folder / "metrics.jsonl", save=folder, **TINY)
    return folder


def flags_of(corpus: Path, folder: Path, **changes: Any) -> list[str]:
    return tiny_flags(corpus, **TINY | {"save": folder, "load": folder} | changes)


def assert_ended_alike(folder: Path, straight: Path, *, by_itself: bool = True) -> None:
    """The last checkpoints and the metrics are equal; no half-written checkpoint lies about, unless the run was killed
    when all was written: there is no save after that which would clear away.
    """
    assert list(differences(checkpoint_folder(folder, STEPS), checkpoint_folder(straight, STEPS))) == []
    mine, theirs = (without_timing(read_metrics(path / "metrics.jsonl")) for path in (folder, straight))
    assert mine == theirs
    assert not by_itself or not list(folder.glob(".*.tmp"))


# Kills


def start_ranks(world_size: int, flags: list[str]) -> list[int]:
    """Fork the ranks of a run; process ids."""
    port, pids = free_port(), []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ |= rank_environment(rank, world_size, port)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
            code = 99
            try:
                code = train.main(flags)
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def wait_for(pids: list[int], seconds: float) -> list[int] | None:
    """The exit codes of all, or None where one still runs after that time."""
    until, codes = time.monotonic() + seconds, dict.fromkeys(pids, None)
    while None in codes.values():
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            pids[:] = [pid for pid, code in codes.items() if code is None]
            return None
        time.sleep(0.001)
    return list(codes.values())


def kill_again_and_again(flags: list[str], folder: str, straight: str, kills: int, world_size: int, seed: int) -> dict:
    """Run and kill at random instants, one rank or all, look at what is on the disk, and resume; when the run gets to
    its end, compare it and begin anew, until so many kills have hit.

    Returns:
        how many kills hit, how many of them in the middle of a save, and how many runs came to their end.
    """
    chance, root = random.Random(seed), Path(folder)
    started = time.monotonic()
    codes = wait_for(start_ranks(world_size, flags), 120)
    assert codes == [0] * world_size
    duration = time.monotonic() - started
    counts = {"kills": 0, "in a save": 0, "ends": 0}
    newest = STEPS
    while True:
        if newest == STEPS:
            assert_ended_alike(root, Path(straight), by_itself=codes is not None)
            counts["ends"] += 1
            if counts["kills"] >= kills:
                return counts
            shutil.rmtree(root)
            newest = 0
        pids = start_ranks(world_size, flags)
        delay = 120.0 if counts["kills"] >= kills else chance.uniform(0.0, duration)
        codes = wait_for(pids, delay)
        if codes is None:
            victims = [pid for pid in pids if chance.random() < 0.5] or pids[:1]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            if wait_for(pids, 1.0) is None:  # those that hang are killed by a launcher too
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                assert wait_for(pids, 60) is not None
            counts["kills"] += 1
            counts["in a save"] += any(root.glob(".iter_*"))
        elif any(codes):
            raise AssertionError(f"exit codes {codes}")
        newest = look_at(root, newest)


def look_at(root: Path, newest: int) -> int:
    """The iteration of the newest complete checkpoint, which is whole, and no earlier one than before."""
    found = find_checkpoint(root, log=lambda line: None) if root.exists() else None
    assert found is not None or newest == 0
    if found is None:
        return 0
    assert list(faults(found)) == []
    named = tracked_iteration(root)
    if named is not None:
        assert list(faults(checkpoint_folder(root, named))) == []
    iteration = int(found.name.split("iter_")[1].split(".")[0])
    assert iteration >= newest
    return iteration


@pytest.mark.parametrize(
    ("world_size", "kills", "changes"),
    [
        pytest.param(1, 10, {}, id="10"),
        pytest.param(2, 2, {"use_distributed_optimizer": True}, id="2 of two ranks"),
        pytest.param(1, 200, {}, id="200", marks=pytest.mark.long),
        pytest.param(1, 5, {"async_save": True, "keep_last": 2}, id="5 async"),
        pytest.param(2, 40, {"use_distributed_optimizer": True}, id="40 of two ranks", marks=pytest.mark.long),
        pytest.param(1, 100, {"async_save": True, "keep_last": 2}, id="100 async", marks=pytest.mark.long),
        pytest.param(
            2,
            20,
            {"async_save": True, "use_distributed_optimizer": True},
            id="20 async of two ranks",
            marks=pytest.mark.long,
        ),
    ],
)
def test_kills(world_size: int, kills: int, changes: dict, corpus: Path, tmp_path: Path):
    straight = tmp_path / "straight"
    train_tiny(corpus, metrics=straight / "metrics.jsonl", world_size=world_size, save=straight, **TINY | changes)
    flags = flags_of(corpus, tmp_path / "killed", **changes)
    arguments = (flags, str(tmp_path / "killed"), str(straight), kills, world_size, kills)
    # In a process of its own, which the first run warms up, so that each of its forks is a run that starts at once.
    (counts,) = run_ranks(1, kill_again_and_again, *arguments, timeout=3600)
    print(counts)
    assert counts["kills"] >= kills
    if kills >= 200:
        assert counts["in a save"] >= 10 and counts["ends"] >= 10


# Damaged files


def truncate(folder: Path) -> str:
    shard = folder / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    return "shard-00000.safetensors has"


def flip_a_byte(folder: Path) -> str:
    shard = folder / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    return "shard-00000.safetensors is damaged: its SHA-256"


def lose_a_shard(folder: Path) -> str:
    (folder / "shard-00000.safetensors").unlink()
    return "shard-00000.safetensors is missing"


def lose_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "it has no manifest.json: it was not finished"


def garble_the_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"files": {"state.json": {}}}')
    return "its manifest.json cannot be read"


def empty_the_tracker(folder: Path) -> str:
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("")
    return ""


def lose_the_tracker(folder: Path) -> str:
    (folder.parent / "latest_checkpointed_iteration.txt").unlink()
    return ""


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip_a_byte,
        lose_a_shard,
        lose_the_manifest,
        garble_the_manifest,
        empty_the_tracker,
        lose_the_tracker,
    ],
)
def test_damage(
    damage: Callable[[Path], str], corpus: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    """Of a run that stopped at 6 the newest checkpoint is damaged: it goes on from the one before, and says why."""
    folder = stopped_at_six(straight, tmp_path)
    said = damage(folder / "iter_0000006")
    assert run_ranks(1, train.main, flags_of(corpus, folder)) == [0]
    out = capfd.readouterr().out
    assert f"iter_0000006 is passed over: {said}" in out.replace(f"{folder}/iter_0000006/", "") if said else True
    assert f"going on at iteration {4 if said else 6}" in out
    assert_ended_alike(folder, straight)


def stopped_at_six(straight: Path, tmp_path: Path) -> Path:
    """The folder of a run as it was when its sixth step was saved."""
    folder = Path(shutil.copytree(straight, tmp_path / "c"))
    for later in range(8, STEPS + 1, 2):
        shutil.rmtree(checkpoint_folder(folder, later))
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["iteration"] <= 6]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_damage_of_all_or_of_the_one_asked_for(
    corpus: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    folder = stopped_at_six(straight, tmp_path)
    for iteration in (2, 4, 6):
        flip_a_byte(checkpoint_folder(folder, iteration))
    for asked in ({"ckpt_step": 4}, {"load": folder / "iter_0000004"}):
        capfd.readouterr()
        assert run_ranks(1, train.main, flags_of(corpus, folder, **{"save": None, "save_interval": None} | asked)) == [
            4
        ]
        assert "iter_0000004/shard-00000.safetensors is damaged" in capfd.readouterr().err
    assert run_ranks(2, train.main, flags_of(corpus, folder)) == [4, 4]
    captured = capfd.readouterr()
    assert captured.out.count("is passed over") == 3
    assert captured.err.count("error") == 1 and "holds no complete checkpoint" in captured.err


# Full disks, and disks that cannot be written


def train_with_small_files(flags: list[str]) -> int:
    """No file may grow beyond some size, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    return train.main(flags)


def test_no_room_for_a_file(corpus: Path, straight: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    folder = stopped_at_six(straight, tmp_path)
    (code,) = run_ranks(1, train_with_small_files, flags_of(corpus, folder))
    captured = capfd.readouterr()
    assert "iter_0000008 could not be saved" in captured.out + captured.err and "Traceback" not in captured.err
    assert code != 0 and look_at(folder, 6) == 6
    assert run_ranks(1, train.main, flags_of(corpus, folder)) == [0]
    assert_ended_alike(folder, straight)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which may be filled, or made read-only: root ignores permissions, but not that."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("only root can mount a file system")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "none", disk], capture_output=True).returncode:
        pytest.skip("root may not mount a tmpfs here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def remount(disk: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)


def test_a_full_disk(corpus: Path, straight: Path, small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """There is room for the checkpoints up to the sixth step, and for less than one more."""
    folder = small_disk / "c"
    metrics = tmp_path / "metrics.jsonl"
    train_tiny(corpus, metrics=metrics, save=folder, **TINY | {"train_iters": STEPS, "exit_interval": 6})
    used = sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))
    remount(small_disk, f"size={used + 50_000}")
    (code,) = run_ranks(1, train.main, flags_of(corpus, folder, metrics_file=metrics))
    captured = capfd.readouterr()
    assert code != 0 and "iter_0000008" in captured.out + captured.err and "Traceback" not in captured.err
    assert look_at(folder, 6) == 6
    remount(small_disk, "size=200m")
    assert run_ranks(1, train.main, flags_of(corpus, folder, metrics_file=metrics)) == [0]
    shutil.copy(metrics, folder / "metrics.jsonl")
    assert_ended_alike(folder, straight)


def train_until_read_only(flags: list[str], disk: str) -> int:
    """The disk turns read-only after step 7, as one does that fails."""
    step = train.Trainer.step_and_report

    def step_then_turn(self, batches):
        step(self, batches)
        if self.progress.iteration == 7:
            remount(Path(disk), "ro")

    train.Trainer.step_and_report = step_then_turn
    return train.main(flags)


def test_a_disk_that_turns_read_only(
    corpus: Path, straight: Path, small_disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    folder = Path(shutil.copytree(stopped_at_six(straight, tmp_path), small_disk / "c"))
    metrics = tmp_path / "c" / "metrics.jsonl"
    flags = flags_of(corpus, folder, metrics_file=metrics)
    (code,) = run_ranks(1, train_until_read_only, flags, str(small_disk))
    captured = capfd.readouterr()
    assert code != 0 and "iter_0000008" in captured.out + captured.err and "Traceback" not in captured.err
    assert run_ranks(1, train.main, flags) == [2]
    assert "must be a folder that can be written" in capfd.readouterr().err
    remount(small_disk, "rw")
    assert look_at(folder, 6) == 6
    assert run_ranks(1, train.main, flags) == [0]
    shutil.copy(metrics, folder / "metrics.jsonl")
    assert_ended_alike(folder, straight)
