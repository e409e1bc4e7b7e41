"""Two nodes for real: two network namespaces joined by a cable (a veth pair), each with a disk of its own at the same
path, torchrun on both. Root only; the kernel must know network namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.checkpoint.test_resume import without_timing
from tests.runs import read_metrics, tiny_flags, write_corpus
from trimegatron.checkpoint.compare import differences
from trimegatron.checkpoint.contents import faults
from trimegatron.checkpoint.directory import checkpoint_folder, find_checkpoint
from trimegatron.checkpoint.resume_check import kill_tree
from trimegatron.launch import children_of

pytestmark = pytest.mark.long

STEPS = 60
SAYS = "trimegatron train: error: "
CABLE = "cable"
PREFIX = "trimegatron-"
"""Of a node's name; behind it stands the process that made it."""


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


@dataclass
class Cluster:
    """Two nodes, and the folder that both see."""

    shared: Path
    disk: Path
    """The path at which each sees its own disk."""
    names: list[str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, node: int, name: str, *flags: str, max_restarts: int = 0, port: int = 29500) -> Run:
        """torchrun on one node; its output goes to a file."""
        launcher = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", name,
            "--rdzv-endpoint", f"10.211.0.1:{port}", "--rdzv-conf", f"is_host={1 - node}",
            "--local-addr", f"10.211.0.{node + 1}", "-m", "trimegatron.train", *flags,
        ]  # fmt: skip
        mount = f'mount --bind "{self.disk.parent / f"disk{node}"}" "{self.disk}" && exec "$@"'
        log = self.shared / f"{name}-{node}-{len(self.started)}.log"
        # A launcher that shares its store with the ranks tells the others of it once: one that is started anew would
        # wait for that in vain, and both end after a minute (torch 2.5 to 2.13).
        environment = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": CABLE,
            "OMP_NUM_THREADS": "1",
        }
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[node], "sh", "-c", mount, "sh", *launcher],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        self.started.append(process)
        return Run(process, log)

    def cut_the_cable(self) -> None:
        run("ip", "-n", self.names[0], "link", "set", CABLE, "down")

    def mend_the_cable(self) -> None:
        run("ip", "-n", self.names[0], "link", "set", CABLE, "up")


@dataclass
class Run:
    """A launcher on one node."""

    process: subprocess.Popen[bytes]
    log: Path

    def ends(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s:\n{self.log.read_text()[-3000:]}") from None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    for name in left_behind():
        remove(name)
    names = [f"{PREFIX}{os.getpid()}-{node}" for node in (0, 1)]
    for folder in ("shared", "disk", "disk0", "disk1"):
        (tmp_path / folder).mkdir()
    nodes = Cluster(tmp_path / "shared", tmp_path / "disk", names)
    try:
        try:
            for name in names:
                run("ip", "netns", "add", name)
            cable = ["name", CABLE, "netns", names[0], "type", "veth", "peer", "name", CABLE, "netns", names[1]]
            run("ip", "link", "add", *cable)
            for node, name in enumerate(names):
                run("ip", "-n", name, "addr", "add", f"10.211.0.{node + 1}/24", "dev", CABLE)
                for link in ("lo", CABLE):
                    run("ip", "-n", name, "link", "set", link, "up")
                # For how long a connection nobody answers on is kept: 100 s in place of 15 minutes.
                run("ip", "netns", "exec", name, "sh", "-c", "echo 8 > /proc/sys/net/ipv4/tcp_retries2")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        write_corpus(nodes.shared / "text")
        yield nodes
    finally:
        for name in names:
            remove(name)
        for process in nodes.started:
            process.wait()


def left_behind() -> list[str]:
    """Nodes of a test that was killed, and could not clear up."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout.splitlines()
    names = [line.split()[0] for line in listed if line.startswith(PREFIX)]
    return [name for name in names if not Path("/proc", name.split("-")[1]).exists()]


def remove(name: str) -> None:
    """End a node and all that runs on it, whoever its parent is by now."""
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
    for pid in map(int, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def flags_of(cluster: Cluster, name: str, **changes: object) -> list[str]:
    save = cluster.shared / name
    asked = {"save": save, "load": save, "save_interval": 2, "train_iters": STEPS, "ddp_bucket_size": 1500}
    return tiny_flags(cluster.shared / "text", use_distributed_optimizer=True, **asked | changes)


def wait_for_iteration(folder: Path, iteration: int, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(ValueError):  # a line that is being written
            if any(line["iteration"] >= iteration for line in read_metrics(folder / "metrics.jsonl")):
                return
        time.sleep(0.01)
    raise AssertionError(f"iteration {iteration} did not come")


def test_a_node_dies_and_comes_back(cluster: Cluster):
    """Straight, with the index maps on the disk of both; and with each its own, when one node is killed and started
    again: the same bits, each node having written its part of every checkpoint."""
    runs = [cluster.start(node, "straight", *flags_of(cluster, "straight")) for node in (0, 1)]
    assert [each.ends(180) for each in runs] == [0, 0], runs[0].log.read_text()[-3000:]

    flags = flags_of(cluster, "killed", data_cache_path=cluster.disk / "cache")
    first, second = (cluster.start(node, "killed", *flags, max_restarts=3, port=29600) for node in (0, 1))
    wait_for_iteration(cluster.shared / "killed", 5)
    kill_tree(second.process)
    second = cluster.start(1, "killed", *flags, max_restarts=3, port=29600)
    assert [first.ends(300), second.ends(60)] == [0, 0], first.log.read_text()[-3000:]
    assert "going on at iteration " in first.log.read_text()

    ends = [checkpoint_folder(cluster.shared / name, STEPS) for name in ("straight", "killed")]
    assert list(differences(*ends)) == []
    assert list(faults(ends[1])) == []
    assert {path.name for path in ends[1].glob("shard-*")} == {f"shard-0000{rank}.safetensors" for rank in (0, 1)}
    mine, theirs = (
        without_timing(read_metrics(cluster.shared / name / "metrics.jsonl")) for name in ("killed", "straight")
    )
    assert mine == theirs
    for node in (0, 1):
        assert list((cluster.disk.parent / f"disk{node}" / "cache").rglob("*-GPTDataset-train-sample_index.npy"))
    assert not list(cluster.disk.iterdir())


def test_the_cable_is_cut(cluster: Cluster):
    """The ranks of both ends stop within the time given and say what they missed, the launchers when the system gives
    their connection up; what was saved is whole."""
    flags = flags_of(cluster, "cut", train_iters=5000, distributed_timeout_minutes=1)
    runs = [cluster.start(node, "cut", *flags) for node in (0, 1)]
    wait_for_iteration(cluster.shared / "cut", 5)
    cluster.cut_the_cable()
    started = time.monotonic()
    while any(children_of(each.process.pid) for each in runs):
        assert time.monotonic() - started < 60 + 15, [each.log.read_text()[-3000:] for each in runs]
        time.sleep(0.1)
    print(f"the ranks ended {time.monotonic() - started:.0f} s after the cut")
    codes = [each.ends(180) for each in runs]
    print(f"the launchers ended {time.monotonic() - started:.0f} s after the cut")
    assert all(codes)
    causes = sorted(line for each in runs for line in each.log.read_text().splitlines() if line.startswith(SAYS))
    assert len(causes) == 2, causes
    assert causes[0].startswith(f"{SAYS}rank 0, iteration ") and "rank 1 is gone: killed, or its machine" in causes[0]
    assert causes[1].startswith(f"{SAYS}rank 1, iteration ") and "has not answered for 54 s" in causes[1]
    found = find_checkpoint(cluster.shared / "cut")
    assert found is not None and list(faults(found)) == []


def test_a_disk_that_one_node_sees(cluster: Cluster):
    """It is refused before anything starts: each node would keep but a part of every checkpoint."""
    runs = [cluster.start(node, "apart", *flags_of(cluster, "apart", save=cluster.disk / "c")) for node in (0, 1)]
    assert all(each.ends(120) for each in runs)
    causes = [line for each in runs for line in each.log.read_text().splitlines() if line.startswith(SAYS)]
    assert len(causes) == 1 and f"--save ({cluster.disk / 'c'}) must be one folder for all ranks" in causes[0], causes
