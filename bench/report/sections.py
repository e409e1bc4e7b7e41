"""What a report says, before it is Markdown or a page: sections of tables, bars and plots, made from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from trimegatron.bench.labels import Benchmarks, label, shared_parameters
from trimegatron.bench.report.beside import bars, beside_others, side_by_side
from trimegatron.bench.report.blocks import Bars, Section, Shade, Table
from trimegatron.bench.report.comparison import Comparison, Found, Key
from trimegatron.bench.report.floors import floor_shares, share_of_floor
from trimegatron.bench.report.growth_plots import growth_sections
from trimegatron.bench.report.roofline import roofline
from trimegatron.bench.results import OURS
from trimegatron.bench.show import show_machine, show_parameters, show_range, show_value


def by_benchmark(found: Mapping[Key, Found]) -> Benchmarks:
    """The results of each benchmark, in order."""
    grouped: Benchmarks = {}
    for (benchmark, _), (result, _) in sorted(found.items(), key=lambda item: item[0][0]):
        grouped.setdefault(benchmark, []).append(result)
    return grouped


def sections(found: Mapping[Key, Found], comparison: Comparison | None) -> list[Section]:
    """All that the report says, in its order."""
    benchmarks = by_benchmark(found)
    changes = [] if comparison is None else [change_section(comparison)]
    return [
        *changes,
        overview(benchmarks),
        *(side_by_side(benchmarks) or [left_out("Ours beside others", "no benchmark here has another variant")]),
        *(floor_shares(benchmarks) or [left_out("Shares of the best there can be", "no result here has a floor")]),
        *(growth_sections(benchmarks) or [left_out("Growth", "nothing was swept; --sweep does it")]),
        roofline(found),
        all_figures(benchmarks),
        origin(found),
    ]


def left_out(title: str, why: str) -> Section:
    return Section(title, [f"Left out: {why}."])


def change_section(comparison: Comparison) -> Section:
    """What is worse and what is better than the baseline."""
    worse, better = comparison.worse, comparison.better
    same = len(comparison.changes) - len(worse) - len(better)
    section = Section(
        f"Against the baseline: {len(worse)} worse, {len(better)} better, {same} the same",
        [
            "A change counts where the medians differ by more than the spreads of both runs' repeats and the tolerance "
            "together; what is counted has no noise."
        ],
    )
    section.is_good = not worse
    section.lines += [f"{len(found)} not compared: {reason}." for reason, found in comparison.unjudged.items()]
    if comparison.missing:
        names = ", ".join(dict.fromkeys(f"{r.case} ({r.figure})" for r, _ in comparison.missing))
        section.lines.append(f"{len(comparison.missing)} of the baseline are missing now, of: {names}.")
    if comparison.added:
        section.lines.append(f"{len(comparison.added)} are new.")
    rows: list[list[str | Shade]] = []
    for word, changes in (("WORSE", worse), ("better", better)):
        for change in sorted(changes, key=lambda change: -abs(change.worsening / (change.before.median or 1))):
            now = change.now
            rows.append([
                Shade(0.0 if word == "WORSE" else 1.0, f"{word} {change.difference_text}"),
                f"{change.benchmark}: {label(now.case, now.parameters, now.parameters)}",
                f"{now.figure}, {now.variant}",
                f"{show_value(change.before.median, now.unit)} → {show_value(now.median, now.unit)}", change.noise_text,
            ])  # fmt: skip
    if rows:
        header = ["", "case", "figure", "before → now", "noise"]
        section.blocks.append(Table(header, rows))
    return section


def overview(benchmarks: Benchmarks) -> Section:
    """One line for each benchmark and figure: in how many cases ours is better than the best of the others."""
    section = Section("At a glance")
    rows: list[list[str | Shade]] = []
    for benchmark, results in benchmarks.items():
        compared: dict[tuple[str, str], list[Bars]] = {}
        for group in beside_others(results, with_swept=True):
            made = bars(group, [])
            others = ", ".join(bar.variant for bar in made.bars if not bar.is_ours)
            compared.setdefault((made.figure, others), []).append(made)
        for (figure, others), groups in compared.items():
            counts = [sum(group.verdict.endswith(word) for group in groups) for word in ("better", "equal", "worse")]
            gains = sorted(group.gain for group in groups)
            middle = f"{statistics.median(gains):.2f} × ({gains[0]:.2f} to {gains[-1]:.2f})".replace("inf", "∞")
            good = Shade(1.0 - counts[2] / len(groups), " / ".join(map(str, counts)))
            rows.append([f"{benchmark}: {figure}", middle, good, others])
        floors: dict[str, list[float]] = {}
        for result in results:
            if result.floor and result.variant.startswith(OURS):
                floors.setdefault(result.figure, []).append(share_of_floor(result))
        for figure, shares in floors.items():
            middle = f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
            equal = sum(share >= 0.995 for share in shares)
            good = Shade(statistics.median(shares), f"0 / {equal} / {len(shares) - equal}")
            rows.append([f"{benchmark}: {figure}", middle, good, "the best there can be"])
    header = ["", "ours in the middle (of all)", "better / equal / worse", "beside"]
    if rows:
        section.lines = [
            "How many times better ours is than the best of the others, and what share it has of the best there can "
            "be; in how many cases it is better, equal within 0.5 %, or worse."
        ]
        section.blocks.append(Table(header, rows))
    else:
        section.lines = ["Nothing here stands beside anything else."]
    return section


def all_figures(benchmarks: Benchmarks) -> Section:
    """Every figure."""
    section = Section("All figures")
    for benchmark, results in benchmarks.items():
        shared = shared_parameters(results)
        names = [name for name in dict.fromkeys(name for r in results for name in r.parameters) if name not in shared]
        rows: list[list[str | Shade]] = [
            [label(r.case, r.parameters, names), r.variant, r.figure, show_range(r),
             "measured" if r.measured else "counted", r.note]
            for r in results
        ]  # fmt: skip
        header = ["case", "variant", "figure", "median (least to most)", "", "note"]
        title = f"{benchmark}, {len(rows)} figures" + (f"; {show_parameters(shared)}" if shared else "")
        section.blocks.append(Table(header, rows, title))
    return section


def origin(found: Mapping[Key, Found]) -> Section:
    """Where every figure comes from."""
    rows: list[list[str | Shade]] = []
    seen = []
    for benchmark, run in ((benchmark, run) for (benchmark, _), (_, run) in found.items()):
        if run not in seen:
            seen.append(run)
            versions = ", ".join(f"{name} {version}" for name, version in run.versions.items() if version)
            revision = (run.revision or "unknown")[:10] + (", changed" if run.dirty else "")
            rows.append([benchmark, show_machine(run.machine), run.date, revision, versions, " ".join(run.command)])
    header = ["benchmark", "machine", "date", "revision", "versions", "command"]
    return Section("Where the figures come from", [], [Table(header, rows)])
