"""What torch's profiler says of one step: launches, idle time, the kernels that take longest, memory on a CPU."""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trimegatron.bench.variants import Variant

Event = dict[str, Any]
"""Of the Chrome trace format: name, cat, ts and dur in µs, args."""

ON_DEVICE = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
"""Categories of what a device does: launches on a GPU, operators on a CPU, where one may run within another."""


@dataclass(frozen=True)
class Trace:
    """Of the steps traced."""

    launches: int
    """Kernels, copies and fills on a GPU; operators on a CPU."""
    idle_share: float
    """Of the time from the first launch to the end of the last one, in which none ran."""
    longest: list[tuple[str, int, float]]
    """Name, number, seconds of all with that name; longest first."""


def record(run: Callable[[], object], device: torch.device, *, memory: bool = False) -> list[Event]:
    """The events of ``run``."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities, profile_memory=memory) as profiler:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def read(events: Iterable[Event], device_type: str) -> Trace:
    """The device's part of a trace."""
    on_device = sorted(
        (event for event in events if event.get("cat") in ON_DEVICE[device_type] and event.get("ph") == "X"),
        key=lambda event: event["ts"],
    )
    seconds: defaultdict[str, float] = defaultdict(float)
    for event in on_device:
        seconds[event["name"]] += event["dur"] / 1e6
    numbers = Counter(event["name"] for event in on_device)
    longest = [(name, numbers[name], seconds[name]) for name in sorted(seconds, key=seconds.__getitem__, reverse=True)]
    return Trace(len(on_device), idle_share(on_device), longest)


def idle_share(events: list[Event]) -> float:
    """Events are sorted by their start; 0 where there are none."""
    if not events:
        return 0.0
    begin = reached = events[0]["ts"]
    idle = 0.0
    for event in events:
        idle += max(0.0, event["ts"] - reached)
        reached = max(reached, event["ts"] + event["dur"])
    return idle / (reached - begin) if reached > begin else 0.0


def peak_bytes(events: Iterable[Event]) -> int:
    """The most that torch's CPU allocator held at a time of what it gave out during a trace with ``memory``."""
    now = peak = 0
    changes = (event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0)
    for event in sorted(changes, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        peak = max(peak, now)
    return peak


def peak_bytes_on_cpu(variant: Variant) -> int:
    """What lives from step to step, and the most that a step needs besides."""
    state = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in variant.state()}
    return sum(state.values()) + peak_bytes(record(variant.step, torch.device("cpu"), memory=True))
