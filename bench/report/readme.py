"""The README's table of figures, made from ``bench/results/`` alone and put between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimegatron.bench.report.comparison import Found, Key, merge
from trimegatron.bench.results import OURS, ROOT, Parameter, read_runs
from trimegatron.bench.show import show_machine, show_value
from trimegatron.errors import ConfigError
from trimegatron.files import write_atomically

README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- figures: trimegatron bench report --readme -->", "<!-- end of figures -->"
FLOOR = "the least there can be"
"""Stands for another variant: the figure's floor."""


@dataclass(frozen=True)
class Row:
    """Which results make a row: one beside another, or the range of the ratios of several."""

    what: str
    benchmark: str
    case: str
    """Empty: any."""
    figure: str
    other: str
    ours: str = OURS
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


TINY: dict[str, Parameter] = {"num_layers": 4, "hidden_size": 256, "device": "cpu"}
"""``trimegatron bench step --config tiny``."""
CODEPARROT: dict[str, Parameter] = {"num_layers": 12, "hidden_size": 768, "device": "cuda", "dropout": 0.1}
LAYER: dict[str, Parameter] = {"tensor_parallel": 1, "seq_length": 512, "hidden_size": 768}
INDEX: dict[str, Parameter] = {"documents": 10_000_000}
ROWS = (
    Row("kept by a layer for backward, no dropout (the formula has its masks)", "activations", "kept by a layer",
        "activations", "Megatron-LM's formula",
        parameters=LAYER | {"hidden_dropout": 0.0, "recompute": "nothing"}),
    Row("kept by a layer for backward, dropout 0.1, selective recomputation", "activations", "kept by a layer",
        "activations", "Megatron-LM's formula",
        parameters=LAYER | {"attention_dropout": 0.1, "recompute": "selective"}),
    Row("weights, gradients, optimizer of a rank: bf16, 8 data-parallel ranks", "memory", "kept by a rank", "total",
        "Megatron-LM's documentation",
        parameters={"precision": "bf16, gradients in fp32", "distributed_optimizer": True, "data_parallel": 8,
                    "hidden_size": 256}),
    Row("operator calls of a step, 12 layers", "operators", "step", "calls", "transformers"),
    Row("bytes that each kernel moves", "kernels", "", "moved", FLOOR),
    Row("bytes sent by a rank, tensor × pipeline × data parallel", "parallel", "", "sent", "the papers' formula",
        parameters={"world_size": 16}),
    Row("bubble of an interleaved pipeline", "bubble", "interleaved", "bubble", FLOOR),
    Row("tokenize Python's standard library", "data", "preprocess", "rate", "gigatoken alone, from memory",
        ours="trimegatron, gigatoken"),
    Row("index maps of 10 M documents", "data", "index maps", "time", "megatron-core and shuffles", parameters=INDEX),
    Row("open 10 M documents", "data", "open from files", "time", "megatron-core", parameters=INDEX),
    Row("training step, 4 layers of 256, on a CPU", "step", "training step", "speed", "transformers", parameters=TINY),
    Row("the same, beside compiled code", "step", "training step", "speed", "transformers compiled", parameters=TINY),
    Row("training step of CodeParrot-small, on a GPU", "device-check", "training step", "speed", "nanoGPT compiled",
        parameters=CODEPARROT),
    Row("checkpoint of 110 M parameters, saved", "checkpoint", "save", "time", "the disk alone"),
    Row("for which training waits with `--async-save`", "checkpoint", "pause of training", "time",
        "a copy of as many bytes"),
    Row("110 M parameters to Hugging Face", "convert", "to Hugging Face", "time", "a copy of as many bytes",
        ours="trimegatron, from our checkpoint"),
)  # fmt: skip


def update_readme() -> str:
    """Write the table into the README; a line on what was done.

    Raises:
        ConfigError: there is no README with the two marks, as where trimegatron is installed without its source.
    """
    if not README.is_file():
        raise ConfigError(f"--readme needs the source: there is no {README}. Run it in a clone.")
    before = README.read_text(encoding="utf-8")
    after = with_table(before, readme_table(merge(read_runs([RESULTS]))[0]), README)
    if after == before:
        return f"{README} is up to date"
    write_atomically(README, after)
    return f"wrote {README}"


def with_table(text: str, table: str, path: Path) -> str:
    """The README's text with the table between its marks. Raises ConfigError."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ConfigError(f"{path} must have the lines {BEGIN!r} and {END!r} once, in this order. Put them back.")
    head, rest = text.split(BEGIN)
    return head + BEGIN + "\n" + table + END + rest.split(END)[1]


def readme_table(found: Mapping[Key, Found]) -> str:
    """The table, where its figures come from, and which are not there."""
    lines = ["| | trimegatron | beside | |", "|---|---|---|---|"]
    origins: dict[str, int] = {}
    missing = []
    for row in ROWS:
        cells = row_cells(row, found, origins)
        if cells is None:
            missing.append(row.what)
        else:
            lines.append(f"| {row.what} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{mark(number)} {origin}  " for origin, number in origins.items()]
    if missing:
        lines.append(f"Not measured yet: {'; '.join(missing)}.  ")
    if not any(result.measured and run.machine.get("gpu") for result, run in found.values()):
        lines.append("Nothing here was measured on a GPU.  ")
    lines.append("All figures, and how to make them: [docs/benchmarks.md](docs/benchmarks.md).")
    return "\n".join(lines) + "\n"


def row_cells(row: Row, found: Mapping[Key, Found], origins: dict[str, int]) -> list[str] | None:
    """Ours, the other, and how it was found; None where a figure is not there."""

    def chosen(variant: str) -> list[Found]:
        return [
            one for (benchmark, _), one in found.items()
            if benchmark == row.benchmark and one.result.figure == row.figure and one.result.variant == variant
            and row.case in ("", one.result.case)
            and all(one.result.parameters.get(name) == value for name, value in row.parameters.items())
        ]  # fmt: skip

    ours = chosen(row.ours)
    others = ours if row.other == FLOOR else chosen(row.other)
    if not ours or not others:
        return None
    result, run = ours[0]
    how = "counted"
    if result.measured:
        origin = f"{show_machine(run.machine)}, {run.date[:10]}, revision {(run.revision or 'unknown')[:10]}"
        how = f"measured {mark(origins.setdefault(origin, len(origins) + 1))}"
    if len(ours) > 1 or row.other == FLOOR:
        beside = {replace(one.result, variant="").identity: one.result.median for one in others}
        pairs = [(one.result, one.result.floor if row.other == FLOOR else beside.get(
            replace(one.result, variant="").identity)) for one in ours]  # fmt: skip
        ratios = [mine.median / other for mine, other in pairs if other]
        ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
        return [f"{' to '.join(ends)} ×", f"{row.other} ({len(ratios)} cases)", how]
    other = others[0].result
    return [show_value(result.median, result.unit), f"{show_value(other.median, other.unit)} ({other.variant})", how]


def mark(number: int) -> str:
    """A footnote's raised number."""
    return "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(number))
