"""What benchmarks share: runs in fresh processes, taking turns; peak memory; what the machine is.

``python -m trimegatron.bench.measure MODULE:FUNCTION ARGUMENTS`` is such a process: it calls the function with the
JSON object ARGUMENTS and prints what it returns, as JSON, on its last line.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trimegatron.errors import UserError

Figures = dict[str, Any]
"""What one run reports, JSON-ready."""


class Contender(NamedTuple):
    """Something to run, in a process of its own."""

    function: str  # module:function
    arguments: Mapping[str, Any]

    def run(self) -> Figures:
        """Raises UserError with the process's last words."""
        command = [sys.executable, "-m", "trimegatron.bench.measure", self.function, json.dumps(dict(self.arguments))]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise UserError(f"{self.function} ended with exit code {result.returncode}: {result.stderr[-2000:]}")
        return json.loads(result.stdout.splitlines()[-1])


def in_turns(contenders: Mapping[str, Contender], rounds: int) -> dict[str, list[Figures]]:
    """Each contender ``rounds`` times, one after another, so that a noisy minute meets all of them."""
    figures: dict[str, list[Figures]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            figures[name].append(contender.run())
    return figures


def check_equal(figures: Mapping[str, list[Figures]], *names: str) -> None:
    """Refuse what does not compute the same. A figure that a contender does not have is not compared.

    Raises:
        UserError: the contenders' values.
    """
    for name in names:
        values = {who: {run[name] for run in runs if name in run} for who, runs in figures.items()}
        if len(set().union(*values.values())) > 1:
            raise UserError(f"the results differ in {name}, so their times mean nothing: {values}")


def median(figures: list[Figures], name: str) -> float:
    return statistics.median(run[name] for run in figures)


def sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()


def peak_memory() -> Figures:
    """The most this process has held, and its largest finished child, in MB of 10⁶ bytes.

    ``ru_maxrss`` would begin with what the parent held when it started this process.
    """
    try:
        status = Path("/proc/self/status").read_text()
        own = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # not Linux
        unit = 1 if sys.platform == "darwin" else 1024
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak_mb": own / 1e6} | ({"largest_child_mb": children / 1e6} if children else {})


def machine() -> Figures:
    """Processor, cores, memory, GPU (None: none), and how busy it is now."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": model,
        "cores": cores,
        "memory_gb": round(memory, 1),
        "gpu": gpu,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Python's and each package's; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(import_module(module), name)(**json.loads(sys.argv[2]))))
