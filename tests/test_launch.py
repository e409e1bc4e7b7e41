"""Launchers: what they do with signals and exit codes, restarts by torchrun, and requeueing by Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import free_port
from tests.runs import read_metrics, tensors_of, tiny_flags, train_tiny, write_corpus
from trimegatron.launch import children_of

ROOT = Path(__file__).parent.parent
COMMON: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 2, "save_interval": 100_000}
ENDLESS = COMMON | {"train_iters": 100_000, "lr_decay_iters": 100_000}
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2", "--master-port")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(prefix, num_documents=4000)
    return prefix


class Launched:
    """A command of Python's in a process of its own, with what it says."""

    def __init__(self, *command: str, log: Path, **environment: str):
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
            )

    def wait_for(self, text: str, seconds: float = 90) -> None:
        """Until ``text`` was said."""
        end = time.monotonic() + seconds
        while text not in self.said:
            assert time.monotonic() < end and self.process.poll() is None, self.said
            time.sleep(0.05)

    def end(self, seconds: float = 90) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()

    @property
    def said(self) -> str:
        return self.log.read_text()


def saved_at(folder: Path) -> int:
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def rank_of(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable).get("RANK")


def test_signals_to_the_launcher(corpus: Path, tmp_path: Path):
    """`trimegatron train` passes a signal on, and the workers' code back, and names a rank that is killed, and its
    signal; bare torchrun passes its SIGTERM on, but no code back."""
    ours = ("trimegatron", "train", "--nproc-per-node", "2")
    commands = {
        "ours": ours,
        "killed": ours,
        "theirs": (*TORCHRUN, str(free_port()), "-m", "trimegatron.train"),
    }
    runs = {
        name: Launched(
            *(sys.executable, "-m", *command),
            *tiny_flags(corpus, **ENDLESS, save=tmp_path / name),
            log=tmp_path / f"{name}.log",
        )
        for name, command in commands.items()
    }
    for name, number in (("ours", signal.SIGUSR1), ("theirs", signal.SIGTERM)):
        runs[name].wait_for(" iteration        3/")
        runs[name].process.send_signal(number)
    killed = runs.pop("killed")
    killed.wait_for(" iteration        3/")
    (victim,) = (pid for pid in children_of(killed.process.pid) if rank_of(pid) == "1")
    os.kill(victim, signal.SIGKILL)
    assert killed.end() == 128 + signal.SIGKILL, killed.said
    assert "error: rank 1 was ended by SIGKILL" in killed.said and "Traceback" not in killed.said
    assert killed.said.count(": rank 1 is gone: ") == killed.said.count("error: rank 0, iteration ") == 1
    assert runs["ours"].end() == 143, runs["ours"].said
    assert runs["theirs"].end() not in (0, 143), runs["theirs"].said
    for name, run in runs.items():
        assert run.said.count("a signal came: stopping at iteration") == 1
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert saved_at(tmp_path / name) == lines[-1]["iteration"] >= 3
    assert "Traceback" not in runs["ours"].said and "error" not in runs["ours"].said


CRASH_ONCE = """
import os, signal, sys
from trimegatron import train

step = train.Trainer.train_step

def crash_once(self, batches):
    if self.progress.iteration == 5 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batches)

train.Trainer.train_step = crash_once
sys.exit(train.main())
"""


def test_torchrun_restarts(corpus: Path, tmp_path: Path):
    """A rank is killed: the others say so and end, all start again, and the end is that of a run where nothing was."""
    flags = COMMON | {"train_iters": 8, "lr_decay_iters": 8, "save_interval": 2}
    (tmp_path / "crash_once.py").write_text(CRASH_ONCE)
    run = Launched(
        sys.executable, "-m", *TORCHRUN, str(free_port()), "--max-restarts", "1", "crash_once.py",
        *tiny_flags(corpus, **flags, save=tmp_path / "c", load=tmp_path / "c"), log=tmp_path / "log",
    )  # fmt: skip
    assert run.end() == 0, run.said
    assert run.said.count("trimegatron train: error: rank 0, iteration 6, ") == 1
    assert "going on at iteration 4" in run.said
    train_tiny(corpus, world_size=2, metrics=tmp_path / "s.jsonl", save=tmp_path / "s", **flags)
    mine, theirs = (tensors_of(tmp_path / name / "iter_0000008") for name in "cs")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [line["iteration"] for line in read_metrics(tmp_path / "c" / "metrics.jsonl")] == list(range(1, 9))


FAKE_SRUN = """#!/bin/bash
# Two tasks of this machine; a signal goes to all of them, and the largest exit code is srun's, as Slurm does it.
shift
for rank in 0 1; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" >> tasks
code=0
for task in "${tasks[@]}"; do
    wait "$task"; one=$?
    (( one > code )) && code=$one
done
exit $code
"""
FAKE_SCONTROL = """#!/bin/bash
case $1 in
    show) echo 127.0.0.1; echo other ;;
    requeue) echo "$2" >> requeued ;;
esac
"""


def test_slurm(corpus: Path, tmp_path: Path):
    """The script under a Slurm of straw: a signal before the time is over, back into the queue, on from there."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2(x1)", "SLURM_JOB_ID": str(free_port() - 20000), "SLURM_JOB_NODELIST": "n[1-2]",
    }  # fmt: skip
    job = str(ROOT / "docs" / "slurm.sbatch")
    assert Launched("bash", job, "--train-iters", "3", log=tmp_path / "no.log", **environment).end() == 2

    first = Launched("bash", job, *tiny_flags(corpus, **ENDLESS, save="c"), log=tmp_path / "1.log", **environment)
    first.wait_for(" iteration        3/")
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGUSR1)
    assert first.end() == 143, first.said
    assert (tmp_path / "requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
    at = saved_at(tmp_path / "c")

    rest = ENDLESS | {"train_iters": at + 2}
    second = Launched("bash", job, *tiny_flags(corpus, **rest, save="c"), log=tmp_path / "2.log", **environment)
    assert second.end() == 0, second.said
    assert f"going on at iteration {at}" in second.said and saved_at(tmp_path / "c") == at + 2
    assert len((tmp_path / "requeued").read_text().split()) == 1


def test_children():
    child = subprocess.Popen(["sleep", "30"])
    assert child.pid in children_of(os.getpid())
    child.kill()
    child.wait()
    assert child.pid not in children_of(os.getpid())
