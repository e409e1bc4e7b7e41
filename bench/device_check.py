"""``trimegatron bench device-check``: all that a GPU can show within eight minutes.

What the device is and can do at best; every kernel's result against the eager reference, in three dtypes and at odd
sizes; the kernels' times beside eager PyTorch, torch.compile and liger-kernel where that is installed; then
CodeParrot-small in rounds beside a compiled nanoGPT, without and with dropout, and a trace. Losses and results that are
wrong are not timed. It ends with where we lose. Nothing is downloaded. The time is kept by leaving later parts out,
each with a line.

``--dry-run`` walks the same way on a CPU, in Triton's interpreter, at tiny sizes; its times say nothing. Exit code 1
where a result is wrong.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from trimegatron.bench import device_kernels, device_machine, device_model, kernel_cases
from trimegatron.bench.case import Case, Shapes, check
from trimegatron.bench.device_timing import WORKING_SET, flush_buffer
from trimegatron.bench.results import OURS, Result, counted
from trimegatron.bench.runner import run
from trimegatron.bench.show import show_result
from trimegatron.config.options import Options, option
from trimegatron.errors import ConfigError, UserError

ODD_SIZES = ((48, 1001), (16, 3), (64, 1000), (48, 5), (32, 12288))
SIZES = ((12288, 768), (16384, 4096))
PARAMETERS = (100_000_000, 1_000_000_000)
DROPOUTS = (0.0, 0.1)
SHARES = {"checks": 0.35, "kernels": 0.6, "dropout 0": 0.8, "dropout 0.1": 0.95, "trace": 1.0}
"""Of the time: when a part begins nothing new any more. What is left is the trace's."""


@dataclass(frozen=True, kw_only=True)
class DeviceCheckConfig(Options):
    """Check of a device"""

    budget: float = option(480.0, "time after which no further part is begun", unit="seconds")
    dry_run: bool = option(False, "on the CPU: tiny, in the interpreter")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dry_run:
            if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
                raise ConfigError("--dry-run must come before Triton is imported. Run it as a process of its own")
            os.environ["TRITON_INTERPRET"] = "1"
        elif not torch.cuda.is_available():
            raise ConfigError(
                "device-check must have a GPU; there is none here. Add --dry-run to try the script itself"
            )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry_run else "cuda:0")


class Budget:
    """The time, and what it did not suffice for."""

    def __init__(self, seconds: float):
        self.start, self.seconds = time.monotonic(), seconds
        self.left_out: list[str] = []

    def deadline(self, part: str) -> float:
        """By ``SHARES``, as ``time.monotonic``."""
        return self.start + SHARES[part] * self.seconds

    def allows(self, part: str, what: str) -> bool:
        """Whether ``what`` may begin; if not, it will be named at the end of the part."""
        if time.monotonic() <= self.deadline(part):
            return True
        self.left_out.append(what)
        return False

    def name_left_out(self, since: int) -> None:
        """Print what was left out after the first ``since``."""
        if len(self.left_out) > since:
            print(f"left out, the time is up: {', '.join(self.left_out[since:])}")


def checked_cases(config: DeviceCheckConfig) -> Iterator[list[Case]]:
    """Each op in three dtypes at sizes that no tile fits, one size after another; the optimizer's with the first."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    sizes = ((16, 5), (16, 33)) if config.dry_run else ODD_SIZES
    optimizer = [case for dtype in dtypes for case in kernel_cases.optimizer_cases(Shapes(3, 77, dtype, config.device))]
    for rows, hidden in sizes:
        cases = [case for dtype in dtypes for case in kernel_cases.cases(rows, hidden, dtype, config.device)]
        yield optimizer + cases if (rows, hidden) == sizes[0] else cases


def timed_cases(config: DeviceCheckConfig) -> Iterator[Case]:
    """In bf16."""
    for rows, hidden in ((16, 8),) if config.dry_run else SIZES:
        yield from kernel_cases.cases(rows, hidden, torch.bfloat16, config.device)
    for count in (64,) if config.dry_run else PARAMETERS:
        yield from kernel_cases.optimizer_cases(Shapes(1, count, torch.bfloat16, config.device))


def is_right(case: Case, wrong: list[str]) -> bool:
    """Check; what is wrong is printed and noted in ``wrong``."""
    try:
        check(case)
    except AssertionError as error:
        wrong.append(str(error))
        print(f"WRONG: {error}")
        return False
    return True


def check_kernels(config: DeviceCheckConfig, budget: Budget, wrong: list[str]) -> Iterator[Result]:
    """The first size is checked whatever the time."""
    num_right = num_all = 0
    for number, size in enumerate(checked_cases(config)):
        for case in size:
            if number == 0 or budget.allows("checks", f"{case.name} {case.shape}"):
                num_all += 1
                num_right += is_right(case, wrong)
    budget.name_left_out(0)
    print(f"{num_right} cases right, {num_all - num_right} wrong")
    yield counted("kernels", OURS, "cases wrong", "cases", num_all - num_right, floor=0, checked=num_all)


def time_kernels(
    config: DeviceCheckConfig, budget: Budget, wrong: list[str], bandwidth: float, flush: torch.Tensor
) -> Iterator[Result]:
    """Each checked at its size before it is timed; dry, what would be timed is called."""
    since = len(budget.left_out)
    print("kernels, and their calls, in µs; share of the copy's rate")
    for case in timed_cases(config):
        if not budget.allows("kernels", f"time of {case.name} {case.shape}") or not is_right(case, wrong):
            continue
        if config.dry_run:
            inputs = case.inputs()
            for function in (
                device_kernels.rivals(case).values() if case.name == "layer_norm_backward" else [case.rival]
            ):
                if function is not None:
                    [call() for call in device_kernels.calls(case, function, [inputs])]
            continue
        found = list(device_kernels.time_case(case, bandwidth, flush))
        print(device_kernels.line(case, found))
        yield from found
        torch.cuda.empty_cache()
    budget.name_left_out(since)


def model_rounds(config: DeviceCheckConfig, budget: Budget, wrong: list[str]) -> Iterator[Result]:
    """Without and with dropout; then the trace, of the last that ran."""
    print("ours with CUDA graphs: left out, the trainer has none")
    last, since = None, len(budget.left_out)
    for dropout in DROPOUTS:
        part = f"dropout {dropout:g}"
        if budget.allows(part, f"{device_model.NAME} at {part}"):
            deadline = budget.deadline(part)
            try:
                found = device_model.run_rounds(config.device, dropout, dry=config.dry_run, deadline=deadline)
            except UserError as error:
                wrong.append(str(error))
                print(f"WRONG: {error}")
                continue
            yield from found.results()
            last = (found.variants[OURS], dropout)
            del found
    if last is not None and budget.allows("trace", "trace"):
        yield from device_model.trace(*last, config.device)
    budget.name_left_out(since)


def where_we_lose(results: Iterable[Result]) -> Iterator[str]:
    """Every case in which another variant is faster than ours, the worst first."""
    results = [result for result in results if result.figure == "time" and result.unit == "s"]
    key: Callable[[Result], tuple[object, ...]] = lambda r: (r.case, tuple(sorted(r.parameters.items())))  # noqa: E731
    ours = {key(result): result.median for result in results if result.variant == OURS}
    losses = [(ours[key(r)] / r.median, r) for r in results if key(r) in ours and r.median < ours[key(r)]]
    for factor, result in sorted(losses, key=lambda loss: -loss[0]):
        size = result.parameters.get("shape", result.note)
        dropout = f", dropout {result.parameters['dropout']:g}" if "dropout" in result.parameters else ""
        yield f"{result.case} {size}{dropout}: {result.variant} is {factor:.2f} times as fast"


def results(config: DeviceCheckConfig, wrong: list[str]) -> Iterator[Result]:
    """Part after part, printed as they come."""
    budget, found = Budget(config.budget), []

    def noted(part: Iterable[Result]) -> Iterator[Result]:
        for result in part:
            found.append(result)
            yield result

    if config.dry_run:
        print("dry run: no time below says anything")
    flush = flush_buffer(config.device)
    print("\n".join(device_machine.describe(config.device)))
    copy = device_machine.bandwidth(1 << 10 if config.dry_run else WORKING_SET, flush)
    spec, how = device_model.form(config.device, 0.0, dry=config.dry_run)
    num_tokens = how.micro_batch_size * spec.max_position_embeddings
    for result in (copy, *device_machine.matrix_rates(spec, num_tokens, flush)):
        print(show_result(result))
        yield result
    yield from check_kernels(config, budget, wrong)
    yield from noted(time_kernels(config, budget, wrong, 1e9 * copy.median, flush))
    yield from noted(model_rounds(config, budget, wrong))
    print("\n  ".join(["where we lose:", *(list(where_we_lose(found)) or ["nowhere"])]))
    yield counted("parts", OURS, "left out", "parts", len(budget.left_out), floor=0, note=", ".join(budget.left_out))


def main(argv: list[str]) -> int:
    """0 when every result is right."""
    wrong: list[str] = []
    code = run(
        "device-check", argv, DeviceCheckConfig, partial(results, wrong=wrong), description=__doc__, show=None,
        packages=("liger-kernel",),
    )  # fmt: skip
    return code or int(bool(wrong))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"device-check: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
