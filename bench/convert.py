"""``trimegatron bench convert``: conversions beside reading and writing the same bytes, on this machine.

Every run is a process of its own, the contenders take turns, and the two sources must give the same files before times
are told. Times are without imports and without the proof; MB are 10⁶ bytes. What is read was written just before, so
that it comes from the system's cache for all of them; what is written is flushed to the disk by all of them.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimegatron.bench.measure import Contender, Figures, check_equal, in_turns, machine, median
from trimegatron.bench.results import OURS, Result, counted, measured
from trimegatron.bench.runner import run
from trimegatron.config.options import Options, option
from trimegatron.errors import UserError

RUNS = "trimegatron.bench.convert_runs"
SIZES = {
    "small": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1003},
    "110m": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 32768},
    "1.5b": {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25, "vocab_size": 50257},
}
CASES = {
    "copy of the weights": ("to Hugging Face", "a copy of as many bytes"),
    "ours to Hugging Face": ("to Hugging Face", f"{OURS}, from our checkpoint"),
    "Megatron-LM to Hugging Face": ("to Hugging Face", f"{OURS}, from Megatron-LM's"),
    "copy of everything": ("from Megatron-LM with the optimizer", "a copy of as many bytes"),
    "Megatron-LM to ours": ("from Megatron-LM with the optimizer", OURS),
}
"""What is run → the case and the variant."""
STAGES = {"1.5b": 8}
"""Pipeline stages of Megatron-LM's form, whose files are made one at a time in memory."""


@dataclass(frozen=True, kw_only=True)
class ConvertBenchConfig(Options):
    """Benchmark of conversions"""

    size: str = option("110m", "the model, fp16 with its optimizer's state", choices=tuple(SIZES))
    optimizer: bool = option(True, "leave the optimizer's state out (1.5b needs 66 GB of disk with it)")
    rounds: int = option(3, "how often the contenders take turns", minimum=1)
    work_dir: str | None = option(
        None, "folder for the checkpoints, on the disk to measure", derived="a temporary one", metavar="DIR"
    )


def main(argv: list[str]) -> int:
    """Make the checkpoints, run the conversions, print a table."""
    return run("convert", argv, ConvertBenchConfig, results, description=__doc__, packages=("safetensors",), show=None)


def results(config: ConvertBenchConfig) -> Iterator[Result]:
    """Time and memory of each conversion and of the copies."""
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, load {here['load_average'][0]:.1f}")
    with ExitStack() as stack:
        work = Path(config.work_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="trimegatron-bench-")))
        work.mkdir(parents=True, exist_ok=True)
        stages = STAGES.get(config.size, 1)
        arguments = {"work": str(work), "model": SIZES[config.size], "optimizer": config.optimizer, "stages": stages}
        made = Contender(f"{RUNS}:make", arguments).run()
        print(f"checkpoint of {made['parameters'] / 1e6:,.1f} M parameters, {made['bytes'] / 1e6:,.0f} MB")
        figures = measure(work, made, config.rounds)
    report(figures)
    for name, runs in figures.items():
        case, variant = CASES[name]
        about: dict[str, Any] = {"model": config.size, "optimizer": config.optimizer}
        yield measured(case, variant, "time", "s", [run["seconds"] for run in runs], **about)
        beyond = [1e6 * (run["peak_mb"] - run["imports_mb"]) for run in runs]
        yield measured(case, variant, "memory beyond the imports", "bytes", beyond, **about)
        yield counted(case, variant, "written", "bytes", round(1e6 * median(runs, "megabytes")), **about)


def measure(work: Path, made: Figures, rounds: int) -> dict[str, list[Figures]]:
    """Conversions and copies, in turns; each writes into a folder of its own, which goes before the next."""
    contenders = {
        "copy of the weights": Contender(
            f"{RUNS}:copy", {"source": made["ours"], "output": str(work / "a"), "num_bytes": made["weight_bytes"]}
        ),
        "ours to Hugging Face": Contender(f"{RUNS}:to_hf", {"source": made["ours"], "output": str(work / "b")}),
        "Megatron-LM to Hugging Face": Contender(
            f"{RUNS}:to_hf", {"source": made["megatron"], "output": str(work / "c")}
        ),
        "copy of everything": Contender(
            f"{RUNS}:copy", {"source": made["ours"], "output": str(work / "d"), "num_bytes": made["bytes"]}
        ),
        "Megatron-LM to ours": Contender(
            f"{RUNS}:from_megatron", {"source": made["megatron"], "output": str(work / "e")}
        ),
    }
    figures: dict[str, list[Figures]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            figures[name] += in_turns({name: contender}, 1)[name]
            shutil.rmtree(str(contender.arguments["output"]))
    check_equal({name: runs for name, runs in figures.items() if name.endswith("Hugging Face")}, "sha256")
    if len({run["sha256"] for run in figures["Megatron-LM to ours"]}) != 1:
        raise UserError("the conversion from Megatron-LM is not the same twice")
    if (written := 1e6 * figures["Megatron-LM to ours"][0]["megabytes"]) < made["bytes"]:
        raise UserError(f"the conversion from Megatron-LM wrote {written:,.0f} bytes of {made['bytes']:,.0f}")
    return figures


def report(figures: dict[str, list[Figures]]) -> None:
    """A line for each, with the ratio to the copy of the same bytes."""
    raw = ""
    for name, runs in figures.items():
        if name.startswith("copy"):
            raw = name
        seconds, megabytes = median(runs, "seconds"), median(runs, "megabytes")
        print(
            f"  {name:28} {seconds:7.2f} s (min {min(run['seconds'] for run in runs):.2f}) for {megabytes:,.0f} MB "
            f"written: {seconds / median(figures[raw], 'seconds'):.2f} × the copy; peak "
            f"{median(runs, 'peak_mb'):,.0f} MB, {median(runs, 'peak_mb') - median(runs, 'imports_mb'):,.0f} MB beyond "
            "the imports"
        )
