"""Where candidates are tried: on a GPU, or without one, compiled for it and computed in the interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from trimegatron.bench.device.timing import copy_rate, flush_buffer, input_sets, time_calls
from trimegatron.bench.measure import Figures, now, versions
from trimegatron.bench.tuning.interpreter import Interpreter
from trimegatron.bench.tuning.search import Tools
from trimegatron.bench.tuning.targets import Settings, Target, compiled, forced, why_wrong
from trimegatron.kernels.launcher import architecture
from trimegatron.kernels.tables import FORMAT, device_name

SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that one program may have, by compute capability: CUDA's "technical specifications"."""


@dataclass(frozen=True)
class Machine:
    """What the search needs of it, and what a table says of it."""

    tools: Tools
    arch: int
    copy_rate: float = 0.0
    """Bytes per second that a copy reads and writes; 0 where nothing is timed."""
    header: Figures = field(default_factory=dict)


@contextmanager
def dry_machine(arch: int) -> Iterator[Machine]:
    """Compiles for compute capability ``arch``; no times."""
    with Interpreter() as interpreter:
        tools = Tools(partial(compiled, arch=arch), interpreter.why_wrong, None, SHARED_LIMITS[arch])
        yield Machine(tools, arch)


@contextmanager
def gpu_machine(device: torch.device) -> Iterator[Machine]:
    """The GPU, its copy rate measured first."""
    timer = _Timer(device)
    arch, properties = architecture(device), torch.cuda.get_device_properties(device)
    rate = copy_rate(device, timer.flush)
    print(f"{properties.name}: a copy moves {rate / 1e9:.0f} GB/s")
    header = {
        "format": FORMAT, "device": device_name(device), "compute_capability": arch / 10, "at": now(),
        "multiprocessors": properties.multi_processor_count, "driver": driver_version(),
        "versions": versions("torch", "triton", "trimegatron"), "copy_GB_per_s": rate / 1e9,
    }  # fmt: skip

    def wrong(target: Target, settings: Settings) -> str | None:
        return why_wrong(target.key, target.case, target.work.checked_at(), settings, device)

    limit = triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
    tools = Tools(partial(compiled, arch=arch), wrong, timer.seconds, limit)
    yield Machine(tools, arch, rate, header)


class _Timer:
    """Times one target after another, its inputs made once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.flush, self.stream = device, flush_buffer(device), torch.cuda.Stream(device)
        self._target: Target | None = None
        self._sets: list[list[Tensor]] = []

    def seconds(self, target: Target, settings: Settings) -> list[float]:
        """Of each run of the case's kernels, without the host's side where they can be captured in a graph."""
        case = target.work.case(target.case, self.device)
        with forced(target.key, settings), torch.cuda.stream(self.stream):
            if target is not self._target:
                self._sets = []
                torch.cuda.empty_cache()
                self._target, self._sets = target, input_sets(case)
            calls: list[Callable[[], Any]] = [partial(case.kernel, *inputs) for inputs in self._sets]
            return time_calls(calls, self.flush, self.stream)["runs_s"]


def driver_version(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """NVIDIA's kernel driver, as in "580.82.07"; None where the system does not say."""
    try:
        found = re.search(r"Module\s+.*?(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else None
