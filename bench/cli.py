"""``trimegatron bench NAME``, and ``trimegatron bench report RESULTS…``."""

from __future__ import annotations

from importlib import import_module

from trimegatron.errors import ConfigError

BENCHMARKS = {
    "activations": "trimegatron.bench.activations",
    "bubble": "trimegatron.bench.bubble",
    "checkpoint": "trimegatron.bench.checkpoint",
    "convert": "trimegatron.bench.convert",
    "data": "trimegatron.bench.data",
    "device-check": "trimegatron.bench.device_check",
    "kernels": "trimegatron.bench.kernels",
    "memory": "trimegatron.bench.memory",
    "operators": "trimegatron.bench.operators",
    "parallel": "trimegatron.bench.parallel",
    "step": "trimegatron.bench.step",
}

REPORT = "trimegatron.bench.report.command"


def main(argv: list[str]) -> int:
    """Run one benchmark, or report on several."""
    names = ", ".join(BENCHMARKS)
    if argv and argv[0] in ("-h", "--help"):
        print(
            f"usage: trimegatron bench NAME [OPTION…]\nBenchmarks: {names}. "
            "`trimegatron bench NAME --help` lists the options of one.\n"
            "`trimegatron bench report RESULTS…` makes tables and a page of what they wrote with --out."
        )
        return 0
    commands = BENCHMARKS | {"report": REPORT}
    if not argv or argv[0] not in commands:
        raise ConfigError(
            f"trimegatron bench needs the name of a benchmark, or report, got {argv[0] if argv else 'nothing'!r}. "
            f"Names: {names}"
        )
    return import_module(commands[argv[0]]).main(argv[1:])
