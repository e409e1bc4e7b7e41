"""``trimegatron bench kernels``: what the kernels move and use, as compiled for a GPU that need not be here.

Counts bytes against the least an op must move, reads registers, spills, occupancy and access widths out of the compiled
code, holds the least time of its instructions against that of its bytes (``pipes.py``), and measures the host's side of
a launch with a stub in place of the driver. It measures no kernel's time: ``python -m trimegatron.bench.device_check``
does, on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from trimegatron.bench.measure import versions
from trimegatron.errors import ConfigError

_COLUMNS = "{:<37}{:>26}{:>10}{:>7}{:>6}{:>7}{:>7}{:>10}{:>17}  {}"


def compiled(rows: int, hidden: int, dtype: torch.dtype, arch: int) -> list[dict[str, Any]]:
    """Of each op at this shape: bytes, and what the code of its first kernel uses."""
    from trimegatron.bench import aot, kernel_cases, pipes
    from trimegatron.bench.traffic import limits, moved_bytes

    found = []
    for case in kernel_cases.cases(rows, hidden, dtype, "meta"):
        inputs = case.inputs()
        launches = aot.record(functools.partial(case.kernel, *inputs))
        code = aot.measure(launches[0], arch)
        devices = pipes.DEVICES.items() if arch == 90 else ()
        bounds = {name: limits(launches[0], code, device) for name, device in devices}
        found.append(
            {
                "op": case.name, "shape": case.shape, "floor_bytes": case.floor, "moved_bytes": moved_bytes(launches),
                "kernels": len(launches), "registers": code.registers, "spill_bytes": code.spill_bytes,
                "occupancy": code.occupancy, "bytes_in_flight": code.bytes_in_flight, "code": str(code),
                "busy": {name: (bound.pipe, bound.share) for name, bound in bounds.items()},
            }
        )  # fmt: skip
    return found


def best_time(call: Callable[[], Any], calls: int = 100, rounds: int = 300) -> float:
    """µs a call, in the best of many short rounds: what the code takes where nothing else runs."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return best * 1e6


def launch_cost() -> dict[str, float]:
    """Host time of one launch of a kernel of 12 arguments and 6 constants, µs: the compiled kernel's own launcher, ours
    (which calls it), Triton's dispatch (which does too); the driver is a stub."""
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


def _launch_cost(kernel: Any) -> dict[str, float]:
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
    return {
        "launcher": best_time(lambda: ready.run(*head, *args, *ready.constants)),
        "static": best_time(lambda: static(0, grid, args, config, constants)),
        "dispatch": best_time(lambda: ordinary_launch(kernel, grid, args, config, constants), rounds=50),
    }


def _print(found: list[dict[str, Any]]) -> None:
    print(
        _COLUMNS.format(
            "op", "shape", "MB", "/floor", "regs", "spill", "occ %", "in flight", "busy on H200", "accesses (bits)"
        )
    )
    for row in found:
        print(
            _COLUMNS.format(
                row["op"], row["shape"], f"{row['moved_bytes'] / 1e6:.1f}",
                f"{row['moved_bytes'] / row['floor_bytes']:.3f}", row["registers"], row["spill_bytes"],
                f"{100 * row['occupancy']:.0f}", f"{row['bytes_in_flight'] >> 10} KB",
                "{} {:.2f}".format(*row["busy"]["H200"]) if row["busy"] else "-", row["code"].partition("shared, ")[2],
            )
        )  # fmt: skip


def main(argv: list[str]) -> int:
    """Count, compile and print."""
    parser = argparse.ArgumentParser(prog="trimegatron bench kernels", description=__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="tokens (default 8192)")
    parser.add_argument("--hidden", type=int, nargs="+", default=[768, 1024, 4096, 8192])
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--arch", type=int, choices=[80, 90, 100], default=90, help="compute capability (default 90)")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON too")
    args = parser.parse_args(argv)
    if args.rows < 16 or args.rows % 16:
        raise ConfigError(f"--rows ({args.rows}) must be a positive multiple of 16. Give another")
    print("No kernel runs here and none of their times is measured: bytes are counted, code is read as compiled for "
          f"sm_{args.arch}.")  # fmt: skip
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict("os.environ", TRITON_CACHE_DIR=cache):
        found = []
        for hidden in args.hidden:
            rows = compiled(args.rows, hidden, getattr(torch, args.dtype), args.arch)
            _print(rows)
            found += rows
        cost = launch_cost()
    print("host time of a launch, µs, with a stub in place of the driver: " +
          ", ".join(f"{name} {value:.2f}" for name, value in cost.items()))  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps({"versions": versions("torch", "triton"), "arch": args.arch, "kernels": found,
                                        "launch_us": cost}, indent=1))  # fmt: skip
    return 0
