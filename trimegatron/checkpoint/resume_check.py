"""``trimegatron checkpoint resume-check FLAGS``: whether a run with these flags, killed and resumed, is the run that
was never stopped, to the bit.

    straight   starts where the command would, trains N steps, saves
    killed     the same, saving on the way, until SIGKILL ends all its processes a step or more after a checkpoint
    resumed    goes on from what the killed one left, to step N

Then weights, moments, progress, loss scale, data record and metrics of the first and the last are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimegatron.checkpoint.checkpoint import CheckpointState
from trimegatron.checkpoint.compare import differences
from trimegatron.checkpoint.directory import checkpoint_folder, tracked_iteration
from trimegatron.checkpoint.resume import find_load
from trimegatron.config import Config, parse_train_args
from trimegatron.config.flags import OptionParser, add_options, build
from trimegatron.config.options import Options, fail, option
from trimegatron.errors import CheckpointError, UserError
from trimegatron.launch import children_of, take_num_processes

TIMING = ("tokens_per_second", "iteration_ms", "peak_memory_bytes")
"""What a metrics line says of the machine, not of the run."""


@dataclass(frozen=True, kw_only=True)
class ResumeCheckConfig(Options):
    """The check

    All other options are those of `trimegatron train`, --nproc-per-node among them."""

    steps: int = option(10, "length of the runs that are compared", unit="iterations", minimum=2)
    kill_after: int = option(
        None, "checkpoint after which the run is killed", unit="iterations", derived="half of steps", minimum=1
    )
    work_dir: str | None = option(
        None, "folder for the three runs, removed at the end if all is equal", derived="beside --save", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kill_after is None:
            self._derive(kill_after=self.steps // 2)
        if self.kill_after >= self.steps:
            fail("kill_after", self.kill_after, f"must be below --steps ({self.steps})")


class TrainingFailed(UserError):
    """One of the runs ended otherwise than it should; it has said why."""

    def __init__(self, name: str, exit_code: int):
        super().__init__(f"the {name} run ended with exit code {exit_code}")
        self.exit_code = exit_code


def main(argv: Sequence[str]) -> int:
    """Run the check; 0 where the resumed run is equal to the straight one, 4 where it is not."""
    parser = OptionParser(prog="trimegatron checkpoint resume-check", description=__doc__)
    add_options(parser, ResumeCheckConfig)
    namespace, flags = parser.parse_known_args(list(argv))
    check = build(ResumeCheckConfig, vars(namespace))
    num_processes, train_flags = take_num_processes(flags)
    config = parse_train_args(train_flags, world_size=num_processes)
    start = starting_iteration(config, check)
    beside = Path(check.work_dir or config.checkpoint.save or ".")
    beside = beside if check.work_dir else beside.absolute().parent
    beside.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="resume-check-", dir=beside))
    runs = Runs(check, config, flags, folder, start)
    runs.run()
    return verdict(runs)


def verdict(runs: Runs) -> int:
    """Compare and say; the exit code. What was equal is removed."""
    found = list(runs.differences())
    for line in found:
        print(f"  {line}")
    if found:
        advice = "" if runs.config.training.deterministic_mode else ". On a GPU, add --deterministic-mode"
        print(f"NOT EXACT: the resumed run differs from the straight one{advice}. The runs are kept in {runs.folder}")
        return CheckpointError.exit_code
    span = f"{runs.start + 1} to {runs.end}"
    print(f"exact: steps {span}, killed and resumed, are those of the straight run to the bit")
    shutil.rmtree(runs.folder)
    return 0


def starting_iteration(config: Config, check: ResumeCheckConfig) -> int:
    """The iteration that the command would start from. Raises ConfigError where the check cannot be made of it."""
    if config.checkpoint.ckpt_step is not None:
        fail("ckpt_step", config.checkpoint.ckpt_step, "does not go with resume-check", way_out="--load iter_… itself.")
    if config.training.skip_train:
        fail("skip_train", True, "does not go with resume-check: nothing is trained")
    found = find_load(config, print)
    start = 0
    if found is not None and not config.checkpoint.finetune:
        start = CheckpointState.read(found).progress.iteration
    if start + check.steps > config.training.train_iters:
        fail(
            "steps",
            check.steps,
            f"must fit between iteration {start} and the end of the run, {config.training.train_iters}",
        )
    return start


@dataclass(frozen=True)
class Runs:
    """The three runs."""

    check: ResumeCheckConfig
    config: Config
    flags: Sequence[str]
    """The user's, with --nproc-per-node."""
    folder: Path
    start: int

    @property
    def end(self) -> int:
        return self.start + self.check.steps

    def run(self) -> None:
        """All three, one after another."""
        straight, broken = self.folder / "straight", self.folder / "resumed"
        is_fresh = find_load(self.config, lambda line: None) is None
        print(f"straight: steps {self.start + 1} to {self.end}", flush=True)
        self.train("straight", straight, load=straight if is_fresh else None)
        print(f"killed: the same until after the checkpoint at {self.start + self.check.kill_after}", flush=True)
        self.train("killed", broken, load=broken if is_fresh else None, kill=True)
        at = tracked_iteration(broken)
        print(f"resumed: from the checkpoint at {at} to {self.end}", flush=True)
        self.train("resumed", broken, load=broken, more=["--no-finetune", "--load-optim"])

    def train(self, name: str, save: Path, *, load: Path | None, kill: bool = False, more: Sequence[str] = ()) -> None:
        """One run of `trimegatron train` in processes of its own, its output in a file.

        ``load`` None leaves the user's. What is given last holds.
        """
        changes: dict[str, Any] = {
            "--save": save,
            "--save-interval": self.start + self.check.kill_after,
            "--exit-interval": self.end,
            "--metrics-file": save / "metrics.jsonl",
            "--log-interval": 1,
        }
        if load is not None:
            changes["--load"] = load
        if self.config.logging.tensorboard_dir:
            changes["--tensorboard-dir"] = save / "tensorboard"
        words = [word for flag, value in changes.items() for word in (flag, str(value))]
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            command = [sys.executable, "-m", "trimegatron", "train", *self.flags, *words, *more]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                if kill:
                    self.kill_after_checkpoint(process, save)
                else:
                    process.wait()
            finally:
                kill_tree(process)
        if process.returncode != (-signal.SIGKILL if kill else 0):
            print("".join(log.read_text().splitlines(keepends=True)[-20:]), file=sys.stderr)
            raise TrainingFailed(name, process.returncode if process.returncode > 0 else 1)

    def kill_after_checkpoint(self, process: subprocess.Popen[bytes], save: Path) -> None:
        """Kill all processes of the run as soon as it has done a step more than it has saved.

        Raises:
            CheckpointError: it came to its end first.
        """
        at = self.start + self.check.kill_after
        while process.poll() is None:
            if (tracked_iteration(save) or 0) >= at and any(line["iteration"] > at for line in metrics_of(save)):
                if (tracked_iteration(save) or 0) < self.end:
                    kill_tree(process)
                    return
                break
            time.sleep(0.001)
        if process.wait() == 0:
            raise CheckpointError(
                f"the run came to step {self.end} before it could be killed after {at}: its steps are too fast. Give "
                "more --steps"
            )

    def differences(self) -> Iterator[str]:
        """A line for whatever is not equal at the end of the straight and of the resumed run."""
        straight, resumed = self.folder / "straight", self.folder / "resumed"
        yield from differences(*(checkpoint_folder(folder, self.end) for folder in (straight, resumed)))
        mine, theirs = metrics_of(straight), metrics_of(resumed)
        iterations = [line["iteration"] for line in theirs if "split" not in line]
        if iterations != list(range(self.start + 1, self.end + 1)):
            yield f"metrics: the resumed run has the iterations {iterations}"
        for one, other in zip(mine, theirs, strict=False):
            if one != other:
                yield f"metrics: {json.dumps(one)} and {json.dumps(other)}"


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics, without what the machine's speed decides."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    lines = (json.loads(line) for line in text.split("\n")[:-1])
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a launcher, before it can act, and then the ranks it has started."""
    children = children_of(process.pid)
    for child in children:
        children += children_of(child)
    process.kill()
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
