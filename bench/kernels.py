"""``trimegatron bench kernels``: what the kernels move and use, as compiled for a GPU that need not be here.

Counts bytes against the least an op must move, reads registers, spills, occupancy and access widths out of the compiled
code, holds the least time of its instructions against that of its bytes (``pipes.py``), and measures the host's side of
a launch with a stub in place of the driver. It measures no kernel's time: ``trimegatron bench device-check`` does, on a
GPU.
"""

from __future__ import annotations

import functools
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from trimegatron.bench.results import OURS, Result, counted, measured
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, fail, option

_ROUNDS = 5
_WAYS = {"launcher": "the compiled kernel's launcher", "static": OURS, "dispatch": "Triton's dispatch"}
_COLUMNS = "{:<37}{:>26}{:>10}{:>7}{:>6}{:>7}{:>7}{:>10}{:>17}  {}"


def counted_ops(rows: int, hidden: int, dtype: torch.dtype, arch: int | None) -> list[dict[str, Any]]:
    """Of each op at this shape: bytes, and what the code of its first kernel uses; ``arch`` None: bytes alone."""
    from trimegatron.bench import aot, kernel_cases, pipes
    from trimegatron.bench.traffic import limits, moved_bytes

    found = []
    for case in kernel_cases.cases(rows, hidden, dtype, "meta"):
        inputs = case.inputs()
        launches = aot.record(functools.partial(case.kernel, *inputs))
        row: dict[str, Any] = {
            "op": case.name, "shape": case.shape, "floor_bytes": case.floor, "moved_bytes": moved_bytes(launches),
            "launches": len(launches),
        }  # fmt: skip
        if arch is not None:
            code = aot.measure(launches[0], arch)
            devices = pipes.DEVICES.items() if arch == 90 else ()
            bounds = {name: limits(launches[0], code, device) for name, device in devices}
            row |= {
                "registers": code.registers, "spill_bytes": code.spill_bytes, "occupancy": code.occupancy,
                "bytes_in_flight": code.bytes_in_flight, "code": str(code),
                "busy": {name: (bound.pipe, bound.share) for name, bound in bounds.items()},
            }  # fmt: skip
        found.append(row)
    return found


def best_time(call: Callable[[], Any], calls: int = 100, rounds: int = 100) -> float:
    """µs a call, in the best of many short rounds: what the code takes where nothing else runs."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def launch_cost() -> dict[str, list[float]]:
    """Host time of a launch of a kernel of 12 arguments and 6 constants, µs, measured a few times: the compiled
    kernel's own launcher, ours (which calls it), Triton's dispatch (which does too); the driver is a stub."""
    import triton

    from trimegatron.bench.stub_driver import StubDriver
    from trimegatron.kernels import bias_dropout_add

    kernel, stub = bias_dropout_add._forward_kernel, StubDriver(record=False)
    with (
        mock.patch.object(triton.runtime.driver, "_active", stub),
        mock.patch.object(torch.cuda, "current_device", stub.get_current_device),
        mock.patch.dict(kernel.device_caches, clear=True),
    ):
        cost = _launch_cost(kernel)
        kernel.device_caches.clear()
        gc.collect()  # compiled kernels ask the driver to unload them, so while there is one
    return cost


def _launch_cost(kernel: Any) -> dict[str, list[float]]:
    from trimegatron.kernels.launcher import Config
    from trimegatron.kernels.static_launch import StaticLaunch, ordinary_launch

    config, grid = Config(8, 128, 4), (64,)
    constants = {"HIDDEN": 128, "HAS_BIAS": True, "HAS_RESIDUAL": True, "DROPOUT": True, "ROWS": 8, "COLUMNS": 128}
    x, samples = torch.zeros(512, 128, dtype=torch.float16), torch.zeros(8, dtype=torch.int64)
    args = (x, x[0], x, x, samples, 512, 8, 5, 3 << 14, 0, 6554, 1.1)
    static = StaticLaunch(kernel)
    static(0, grid, args, config, constants)
    (ready,) = static._prepared.values()
    head = (64, 1, 1, 7, ready.function, ready.metadata, None, None, None)
    ways: dict[str, Callable[[], Any]] = {
        "launcher": lambda: ready.run(*head, *args, *ready.constants),
        "static": lambda: static(0, grid, args, config, constants),
        "dispatch": lambda: ordinary_launch(kernel, grid, args, config, constants),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, call in ways.items():
            times[name].append(best_time(call))
    return times


def _print(found: list[dict[str, Any]]) -> None:
    print(
        _COLUMNS.format(
            "op", "shape", "MB", "/floor", "regs", "spill", "occ %", "in flight", "busy on H200", "accesses (bits)"
        )
    )
    for row in found:
        code: tuple[Any, ...] = ("",) * 6
        if "code" in row:
            occupancy, in_flight = f"{100 * row['occupancy']:.0f}", f"{row['bytes_in_flight'] >> 10} KB"
            busy = "{} {:.2f}".format(*row["busy"]["H200"]) if row["busy"] else "-"
            accesses = row["code"].partition("shared, ")[2]
            code = row["registers"], row["spill_bytes"], occupancy, in_flight, busy, accesses
        moved = f"{row['moved_bytes'] / 1e6:.1f}", f"{row['moved_bytes'] / row['floor_bytes']:.3f}"
        print(_COLUMNS.format(row["op"], row["shape"], *moved, *code))


@dataclass(frozen=True, kw_only=True)
class KernelsBenchConfig(Options):
    """Kernels as compiled"""

    rows: int = option(8192, "rows of the tensors; a multiple of 16", unit="tokens", minimum=16)
    hidden: list[int] = option(
        [768, 1024, 4096, 8192], "length of a row: width, keys of the softmax, vocabulary of the loss", minimum=1
    )
    dtype: str = option("bfloat16", "of the tensors", choices=("bfloat16", "float16", "float32"))
    arch: int = option(90, "compute capability to compile for", choices=(80, 90, 100))
    code: bool = option(True, "compile nothing, and count bytes alone")
    launch: bool = option(True, "leave the host time of a launch out, the one figure that is measured")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows % 16:
            fail("rows", self.rows, "must be a multiple of 16")


def main(argv: list[str]) -> int:
    """Count, compile and print."""
    sweeps = {"hidden": (64, 512, 4096, 65536), "rows": (64, 512, 4096, 65536)}
    return run("kernels", argv, KernelsBenchConfig, results, description=__doc__, sweeps=sweeps, show=None)


def results(config: KernelsBenchConfig) -> Iterator[Result]:
    """Of each op at each size the bytes and what its code uses, printed in a table; and the cost of a launch."""
    print("No kernel runs here and none of their times is measured: bytes are counted"
          + (f", code is read as compiled for sm_{config.arch}." if config.code else "."))  # fmt: skip
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict("os.environ", TRITON_CACHE_DIR=cache):
        for hidden in config.hidden:
            arch = config.arch if config.code else None
            rows = counted_ops(config.rows, hidden, getattr(torch, config.dtype), arch)
            _print(rows)
            for row in rows:
                yield from _results(row, config, hidden)
        cost = launch_cost() if config.launch else {}
    for way, times in cost.items():
        yield measured("launch", _WAYS[way], "host time", "s", [1e-6 * time for time in times])
    if cost:
        print("host time of a launch, µs, with a stub in place of the driver: " +
          ", ".join(f"{name} {min(times):.2f}" for name, times in cost.items()))  # fmt: skip


def _results(row: dict[str, Any], config: KernelsBenchConfig, hidden: int) -> Iterator[Result]:
    """What is known of an op at one size."""
    size: dict[str, Any] = {"rows": config.rows, "hidden": hidden, "dtype": config.dtype}
    found = functools.partial(counted, row["op"], OURS, note=row["shape"])
    yield found("moved", "bytes", row["moved_bytes"], floor=row["floor_bytes"], **size)
    yield found("launches", "launches", row["launches"], **size)
    if not config.code:
        return
    size["arch"] = config.arch
    yield found("registers", "registers", row["registers"], **size)
    yield found("spilled", "bytes", row["spill_bytes"], **size)
    yield found("occupancy", "of the warps", row["occupancy"], better="higher", **size)
    yield found("loads in flight", "bytes", row["bytes_in_flight"], better="higher", **size)
    for device, (pipe, share) in row["busy"].items():
        name = f"instructions on a {device}"
        yield counted(row["op"], OURS, name, "of the bytes' time", share, note=f"most on the pipe {pipe}", **size)
