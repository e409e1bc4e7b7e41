"""``trimegatron bench report RESULTS…``: what benchmarks wrote with --out, as Markdown and as one HTML page.

RESULTS are such files, or folders of them; of figures that several files have, the newest counts. With --baseline the
report begins with what is worse than there, beyond the spread of the repeats, and the exit code is 1 where anything is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimegatron.bench.report.comparison import Comparison, Found, Key, compare, merge
from trimegatron.bench.report.markdown import markdown
from trimegatron.bench.report.page import page
from trimegatron.bench.report.readme import update_readme
from trimegatron.bench.report.sections import sections
from trimegatron.bench.results import read_runs
from trimegatron.config.flags import parse
from trimegatron.config.options import Options, fail, option
from trimegatron.errors import ConfigError
from trimegatron.files import write_atomically

TITLE = "trimegatron: benchmarks"


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Options):
    """Report"""

    results: list[Path] = option([], "files that benchmarks wrote, or folders of them", metavar="PATH")
    baseline: list[Path] = option([], "the same of an earlier state, to find what is worse now", metavar="PATH")
    tolerance: float = option(0.02, "share of a measured value that is never a change, however little it spreads")
    out: Path | None = option(
        None, "write a .html or .md file, or both as report.html and report.md into a folder", metavar="PATH"
    )
    readme: bool = option(False, "bring the table of the README up to date, from bench/results, and do nothing else")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.results and not self.readme:
            fail(
                "results", None, "is required", way_out="Give files of `trimegatron bench NAME --out FILE`, or folders."
            )
        if self.readme and (self.results or self.baseline or self.out):
            fail("readme", None, "stands alone: its table is made from bench/results", way_out="Leave the others out.")


def main(argv: list[str]) -> int:
    """Read, compare, write; 1 where something is worse than the baseline."""
    argv = ["--results", *argv] if argv and not argv[0].startswith("-") else argv
    (config,) = parse(argv, ReportConfig, prog="trimegatron bench report", description=__doc__ or "")
    if config.readme:
        print(update_readme())
        return 0
    found, superseded = merge(read_runs(config.results))
    comparison = None
    if config.baseline:
        comparison = compare(merge(read_runs(config.baseline))[0], found, config.tolerance)
    made, summary = sections(found, comparison), summarize(found, superseded)
    outputs = output_files(config.out)
    if not outputs:
        print(markdown(made, TITLE, summary))
    for path in outputs:
        write_atomically(path, (page if path.suffix == ".html" else markdown)(made, TITLE, summary))
        print(f"wrote {path}")
    return verdict(comparison)


def output_files(out: Path | None) -> list[Path]:
    """The files to write. A folder is made.

    Raises:
        ConfigError: another kind of file.
    """
    if out is None:
        return []
    if out.suffix in (".html", ".md"):
        if not out.parent.is_dir():
            fail("out", out, "must be in a folder that exists", way_out=f"Make {out.parent} first.")
        return [out]
    if out.suffix or out.is_file():
        raise ConfigError(f"--out ({out}) must end in .html or .md, or be a folder. Give another name.")
    out.mkdir(parents=True, exist_ok=True)
    return [out / "report.html", out / "report.md"]


def summarize(found: dict[Key, Found], superseded: int) -> Sequence[str]:
    """What is in the report, in a few lines."""
    measured = sum(result.measured for result, _ in found.values())
    benchmarks = dict.fromkeys(benchmark for benchmark, _ in found)
    gpus = {run.machine["gpu"] for result, run in found.values() if result.measured and run.machine.get("gpu")}
    lines = [
        f"{len(found)} figures of {len(benchmarks)} benchmarks ({', '.join(benchmarks)}): {measured} measured, "
        f"{len(found) - measured} counted, which are the same on every machine.",
        f"Measured on {', '.join(sorted(gpus))}." if gpus else "No figure here was measured on a GPU.",
    ]
    if superseded:
        lines.append(f"{superseded} older values of the same figures were left out.")
    return lines


def verdict(comparison: Comparison | None) -> int:
    """Say what is worse; the exit code."""
    if comparison is None:
        return 0
    for change in comparison.worse:
        print(
            f"WORSE: {change.benchmark}: {change.now.case}, {change.now.variant}, {change.now.figure}: "
            f"{change.difference_text}, noise {change.noise_text}"
        )
    unjudged = sum(map(len, comparison.unjudged.values()))
    print(
        f"{len(comparison.worse)} worse, {len(comparison.better)} better, of {len(comparison.changes)} compared; "
        f"{unjudged} could not be, {len(comparison.missing)} are missing"
    )
    return 1 if comparison.worse else 0
