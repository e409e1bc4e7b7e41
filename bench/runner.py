"""Runs a benchmark: options, the cases one after another, the file that ``trimegatron bench report`` reads.

A benchmark is a dataclass of options and a function that yields ``Result``s (docs/benchmarks.md shows a whole one):

    def main(argv):
        return run("memory", argv, MemoryBenchConfig, results, description=__doc__)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimegatron.bench.growth import describe_growth
from trimegatron.bench.measure import machine, now, versions
from trimegatron.bench.results import Parameter, Result, Run, source_revision, write_run
from trimegatron.bench.show import show_result
from trimegatron.config.flags import OptionParser, add_options, build, convert, parse
from trimegatron.config.options import Option, Options, check_value, fail, option, options_of

PACKAGES = ("trimegatron", "torch", "triton", "numpy", "transformers")


@dataclass(frozen=True, kw_only=True)
class OutputConfig(Options):
    """Results"""

    out: Path | None = option(None, "write all figures there, for `trimegatron bench report`", metavar="FILE")
    sweep: list[str] = option(
        [],
        "a whole-number option of the above, by name, and the values to run it at, one after another; without values "
        "those that the benchmark knows",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.out is not None and not self.out.parent.is_dir():
            fail("out", self.out, "must be in a folder that exists", way_out=f"Make {self.out.parent} first.")


def run(
    name: str,
    argv: Sequence[str],
    options: type,
    results: Callable[[Any], Iterable[Result]],
    *,
    description: str | None,
    sweeps: Mapping[str, Sequence[int]] | None = None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    packages: Sequence[str] = (),
    show: Callable[[Result], str] | None = show_result,
) -> int:
    """Run a benchmark from its command line.

    Args:
        options: the benchmark's dataclass of options.
        results: yields its results; what is wrong it raises as UserError before anything is timed.
        sweeps: option → values, for ``--sweep`` without values.
        presets: name → options, for ``--config NAME``.
        packages: whose versions are written down beside ``PACKAGES``.
        show: a result's line; None where ``results`` prints tables of its own.
    """
    config, output = parse(
        argv, options, OutputConfig, prog=f"trimegatron bench {name}", description=description or "", presets=presets
    )
    swept = sweep_values(options_of(options), output, sweeps or {})

    def found() -> Iterator[Result]:
        if swept is None:
            yield from results(config)
            return
        dimension, values = swept
        is_list = options_of(options)[dimension].is_list
        for value in values:
            print(f"\n== {dimension} {value:,}", flush=True)
            for result in results(dataclasses.replace(config, **{dimension: [value] if is_list else value})):
                yield with_parameter(result, dimension, value)

    def shown() -> Iterator[Result]:
        for result in found():
            if show is not None:
                print(show(result), flush=True)
            yield result

    return record(name, argv, shown(), output.out, packages)


def record(name: str, argv: Sequence[str], results: Iterable[Result], out: Path | None, packages: Sequence[str]) -> int:
    """Take all results, say how they grow, and write them where ``out`` asks for it."""
    date, before = now(), machine()
    revision, dirty = source_revision()
    cases = list(results)
    for line in describe_growth(cases):
        print(line)
    about = before | {"load_average_after": machine()["load_average"]}
    command = ["trimegatron", "bench", name, *argv]
    write_run(Run(name, date, revision, dirty, about, versions(*PACKAGES, *packages), command, cases), out)
    if out is not None:
        print(f"{out}: {len(cases)} figures")
    return 0


def take_output(argv: Sequence[str]) -> tuple[OutputConfig, list[str]]:
    """For a benchmark whose other options are those of something else: ours, and what is left."""
    parser = OptionParser(add_help=False)
    add_options(parser, OutputConfig)
    namespace, rest = parser.parse_known_args(argv)
    return build(OutputConfig, vars(namespace)), rest


def sweep_values(
    options: Mapping[str, Option], output: OutputConfig, sweeps: Mapping[str, Sequence[int]]
) -> tuple[str, Sequence[int]] | None:
    """The option to sweep, of those by field name, and its values. Raises ConfigError."""
    if not output.sweep:
        return None
    name = output.sweep[0].lstrip("-").replace("-", "_")
    known = {field: declared for field, declared in options.items() if declared.type is int}
    if name not in known:
        fail("sweep", output.sweep[0], f"must be a whole-number option of this benchmark: {', '.join(known) or 'none'}")
    given = output.sweep[1:]
    declared = dataclasses.replace(known[name], is_list=False)
    values = [convert(declared, text) for text in given] or sweeps.get(name, ())
    if not values:
        fail("sweep", name, "needs values here", way_out=f"Write --sweep {name} 16 160 1600, or what fits.")
    for value in values:
        check_value(declared, value)
    return name, values


def with_parameter(result: Result, name: str, value: Parameter) -> Result:
    """The result, which depends on this parameter too."""
    return dataclasses.replace(result, parameters={name: value} | result.parameters)
