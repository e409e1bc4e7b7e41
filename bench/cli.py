"""``trimegatron bench NAME``."""

from __future__ import annotations

from importlib import import_module

from trimegatron.errors import ConfigError

BENCHMARKS = {
    "activations": "trimegatron.bench.activations",
    "bubble": "trimegatron.bench.bubble",
    "checkpoint": "trimegatron.bench.checkpoint",
    "convert": "trimegatron.bench.convert",
    "data": "trimegatron.bench.data",
    "kernels": "trimegatron.bench.kernels",
    "memory": "trimegatron.bench.memory",
    "operators": "trimegatron.bench.operators",
    "parallel": "trimegatron.bench.parallel",
    "step": "trimegatron.bench.step",
}


def main(argv: list[str]) -> int:
    """Run one benchmark."""
    names = ", ".join(BENCHMARKS)
    if argv and argv[0] in ("-h", "--help"):
        print(
            f"usage: trimegatron bench NAME [OPTION…]\nBenchmarks: {names}. "
            "`trimegatron bench NAME --help` lists the options of one."
        )
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        raise ConfigError(
            f"trimegatron bench needs the name of a benchmark, got {argv[0] if argv else 'nothing'!r}. Names: {names}"
        )
    return import_module(BENCHMARKS[argv[0]]).main(argv[1:])
