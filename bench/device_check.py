"""``python -m trimegatron.bench.device_check``: every kernel on a GPU, checked and then timed, within some minutes.

First each op's result against the eager reference, in three dtypes and at odd sizes; then the table: each op at the
sizes that matter as GB/s of the bytes it must move, and as a share of what a copy reaches on the same device, beside
eager PyTorch, torch.compile and liger-kernel where that is installed. Two times each: of the kernels alone (a CUDA
graph) and of the call. Inputs rotate through a gigabyte, so that nothing is found in the L2 cache. Nothing is
downloaded. A result that is wrong is not timed.

``--dry-run`` walks the same way on a CPU, in Triton's interpreter, at tiny sizes and without a time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimegatron.bench import kernel_cases
from trimegatron.bench.case import Case, Shapes, check, incoming
from trimegatron.bench.device_timing import copy_rate, flush_buffer, input_sets, time_calls
from trimegatron.bench.measure import now, versions
from trimegatron.errors import ConfigError

_ODD_SIZES = ((16, 3), (48, 5), (64, 1000), (48, 1001), (32, 12288))
_SIZES = tuple((8192, hidden) for hidden in (768, 1024, 4096, 8192))
_PARAMETERS = (100_000_000, 1_000_000_000)


@dataclass(frozen=True)
class Plan:
    """What to run; ``dry`` is tiny."""

    device: torch.device
    budget: float
    dry: bool

    def checked(self) -> Iterator[Case]:
        """Each op in three dtypes at sizes that no tile fits."""
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for rows, hidden in ((16, 5), (16, 33)) if self.dry else _ODD_SIZES:
                yield from kernel_cases.cases(rows, hidden, dtype, self.device)
            yield from kernel_cases.optimizer_cases(Shapes(3, 77, dtype, self.device))

    def timed(self) -> Iterator[Case]:
        """The table's rows, in bf16."""
        for rows, hidden in ((16, 8),) if self.dry else _SIZES:
            yield from kernel_cases.cases(rows, hidden, torch.bfloat16, self.device)
        for count in (64,) if self.dry else _PARAMETERS:
            yield from kernel_cases.optimizer_cases(Shapes(1, count, torch.bfloat16, self.device))


def rivals(case: Case) -> dict[str, Callable[..., Any]]:
    """Name -> the forward computation."""
    if case.rival is None:
        return {}
    torch.compiler.reset()  # else many shapes of one function end in its fallback
    found = {"eager": case.rival, "compile": torch.compile(case.rival, dynamic=False)}
    if importlib.util.find_spec("liger_kernel") and case.name.startswith("layer_norm"):
        norm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        found["liger"] = lambda x, w, b, *_: norm.apply(x, w, b, 1e-5)
    return found


def calls(case: Case, function: Callable[..., Any], sets: list[list[Tensor]]) -> list[Callable[[], Any]]:
    """One call for each set of inputs: the forward computation, or the backward pass of one that has run."""
    if not case.leaves:
        return [partial(function, *inputs) for inputs in sets]
    made: list[Callable[[], Any]] = []
    for inputs in sets:
        taken = [x.detach().requires_grad_() for x in inputs[: case.leaves]]
        y = function(*taken, *inputs[case.leaves :])
        gradients = incoming(y, inputs)
        made.append(partial(torch.autograd.grad, y, taken, gradients, retain_graph=True))
    return made


def time_case(case: Case, copy_rate: float, flush: Tensor) -> dict[str, Any]:
    """Ours and the rivals' times, and from them GB/s of the case's floor and the share of the copy rate."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        return _time_case(case, copy_rate, flush, stream)


def _time_case(case: Case, copy_rate: float, flush: Tensor, stream: torch.cuda.Stream) -> dict[str, Any]:
    sets = input_sets(case)
    row: dict[str, Any] = {"op": case.name, "shape": case.shape, "floor_bytes": case.floor, "buffers": len(sets)}
    contenders: dict[str, Callable[[], list[Callable[[], Any]]]]
    contenders = {"ours": lambda: [partial(case.kernel, *inputs) for inputs in sets]}
    contenders |= {name: partial(calls, case, function, sets) for name, function in rivals(case).items()}
    for name, make in contenders.items():
        times = time_calls(make(), flush, stream)
        rate = case.floor / times.get("kernel_s", times["call_s"])
        row[name] = times | {"GB_per_s": rate / 1e9, "of_copy": rate / copy_rate}
    return row


def _row_text(row: dict[str, Any]) -> str:
    parts = []
    for name in ("ours", "eager", "compile", "liger"):
        if name in row:
            kernel = row[name].get("kernel_s")
            micro = f"{kernel * 1e6:.1f}" if kernel else "no graph"
            parts.append(f"{name} {micro} ({row[name]['call_s'] * 1e6:.1f}) µs {100 * row[name]['of_copy']:.0f} %")
    return f"{row['op']:<28}{row['shape']:>26}  " + "; ".join(parts)


def run(plan: Plan, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Check, then time what the budget allows. ``failures`` of the result is empty when all is right."""
    start = time.monotonic()
    result: dict[str, Any] = {"at": now(), "versions": versions("torch", "triton", "liger-kernel"), "dry_run": plan.dry,
                              "checked": 0, "failures": [], "left_out": [], "rows": []}  # fmt: skip

    def checked(case: Case) -> bool:
        try:
            check(case)
        except AssertionError as error:
            result["failures"].append(str(error))
            say(f"WRONG: {error}")
            return False
        result["checked"] += 1
        return True

    for case in plan.checked():
        checked(case)
    say(f"{result['checked']} cases right, {len(result['failures'])} wrong")
    if not plan.dry:
        flush = flush_buffer(plan.device)
        result["device"] = torch.cuda.get_device_name(plan.device)
        result["copy_GB_per_s"] = (rate := copy_rate(plan.device, flush)) / 1e9
        say(f"{result['device']}: a copy moves {rate / 1e9:.0f} GB/s; kernel (call) time and share of the copy's rate")
    for case in plan.timed():
        if time.monotonic() - start > plan.budget:
            result["left_out"].append(f"{case.name} {case.shape}")
        elif not checked(case):
            continue
        elif plan.dry:
            inputs = case.inputs()
            for function in rivals(case).values() if case.name == "layer_norm_backward" else [case.rival]:
                if function is not None:
                    [call() for call in calls(case, function, [inputs])]
            result["rows"].append({"op": case.name, "shape": case.shape, "floor_bytes": case.floor})
        else:
            row = time_case(case, rate, flush)
            result["rows"].append(row)
            say(_row_text(row))
            torch.cuda.empty_cache()
    if result["left_out"]:
        say(f"left out, the time was up: {', '.join(result['left_out'])}")
    return result


def main(argv: list[str]) -> int:
    """0 when every result is right."""
    parser = argparse.ArgumentParser(prog="python -m trimegatron.bench.device_check", description=__doc__)
    parser.add_argument("--budget", type=float, default=450.0, help="seconds after which nothing more is timed")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: tiny, in the interpreter, no times")
    parser.add_argument("--out", type=Path, help="JSON file (default bench/results/GPU.json; none in a dry run)")
    args = parser.parse_args(argv)
    if args.dry_run:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("--dry-run must come before Triton is imported. Run it as a process of its own")
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise ConfigError("device_check must have a GPU; there is none here. Add --dry-run to try the script itself")
    result = run(Plan(torch.device("cpu" if args.dry_run else "cuda:0"), args.budget, args.dry_run))
    out = args.out
    if out is None and not args.dry_run:
        out = Path(__file__).parent / "results" / f"kernels-{result['device'].replace(' ', '-')}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {out}")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"device_check: error: {error}")
