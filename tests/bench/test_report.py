"""The report: what it marks as worse, what it shows and leaves out, and the README's table."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trimegatron.bench import runner
from trimegatron.bench.labels import shared_parameters, telling_parameters
from trimegatron.bench.report import readme
from trimegatron.bench.report.charts import axis, ticks
from trimegatron.bench.report.command import main
from trimegatron.bench.report.comparison import merge
from trimegatron.bench.results import OURS, Result, Run, counted, measured, read_run, read_runs, write_run
from trimegatron.config.options import Options, option
from trimegatron.errors import ConfigError

MACHINE = {"cpu": "a processor", "cores": 2, "memory_gb": 8.0, "gpu": None, "load_average": [0.0, 0.0, 0.0]}


def write(
    path: Path, *cases: Result, benchmark: str = "x", date: str = "2026-01-01T00:00:00+00:00", **machine: Any
) -> Path:
    run = Run(
        benchmark, date, "abcdef0123456789", False, MACHINE | machine, {"torch": "2"}, ["trimegatron"], list(cases)
    )
    write_run(run, path)
    return path


def seconds(*values: float, variant: str = OURS, **parameters: Any) -> Result:
    return measured("step", variant, "time", "s", values, **parameters)


@pytest.mark.parametrize(
    ("before", "now", "code"),
    [
        ((1.0, 1.05, 1.1), (1.1, 1.15, 1.2), 0),  # the spreads meet
        ((1.0, 1.01, 1.02), (1.03, 1.04, 1.05), 0),  # apart, but by less than both spreads and the tolerance
        ((1.0, 1.01, 1.02), (1.11, 1.12, 1.13), 1),
        ((1.0, 1.01, 1.02), (0.5, 0.51, 0.52), 0),
    ],
)
def test_slower_beyond_the_noise(before: tuple, now: tuple, code: int, tmp_path: Path, capsys: pytest.CaptureFixture):
    old, new = write(tmp_path / "old.json", seconds(*before)), write(tmp_path / "new.json", seconds(*now))
    assert main([str(new), "--baseline", str(old)]) == code
    out = capsys.readouterr().out
    assert f"{code} worse, {1 if now[0] < 1 else 0} better, of 1 compared" in out
    assert ("WORSE: x: step, trimegatron, time: +10.9%, noise 6.0%" in out) == bool(code)


def test_rates_fall_and_counts_have_no_noise(tmp_path: Path, capsys: pytest.CaptureFixture):
    def results(rate: float, calls: int) -> list[Result]:
        rates = [rate, 1.001 * rate]
        return [
            measured("read", OURS, "rate", "MB/s", rates, better="higher"),
            counted("step", OURS, "calls", "calls", calls),
        ]

    old = write(tmp_path / "old.json", *results(100, 1000))
    assert main([str(write(tmp_path / "new.json", *results(120, 999))), "--baseline", str(old)]) == 0
    assert main([str(write(tmp_path / "new.json", *results(100, 1001))), "--baseline", str(old)]) == 1
    assert "calls: +0.1%, noise 0.0%" in capsys.readouterr().out
    assert main([str(write(tmp_path / "new.json", *results(90, 1000))), "--baseline", str(old)]) == 1
    assert main([str(tmp_path / "new.json"), "--baseline", str(old), "--tolerance", "0.2"]) == 0


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture):
    """One repeat, another machine, and figures that are only here or there; none of them is a regression."""
    calls = counted("step", OURS, "calls", "calls", 5)
    old = write(tmp_path / "old.json", seconds(1.0), seconds(1.0, 1.1, size=3), calls)
    new = write(tmp_path / "new.json", seconds(9.0), seconds(9.0, 9.1, size=4), seconds(1.0, 2.0, size=5), calls)
    assert main([str(new), "--baseline", str(old)]) == 0
    out = capsys.readouterr().out
    assert "1 not compared: measured once only" in out and "2 are new" in out
    assert "1 of the baseline are missing now, of: step (time)" in out
    assert "0 worse, 0 better, of 1 compared; 1 could not be, 1 are missing" in out
    old, new = (
        write(tmp_path / "old.json", seconds(1.0, 1.1)),
        write(tmp_path / "new.json", seconds(9.0, 9.1), cores=64),
    )
    assert main([str(new), "--baseline", str(old)]) == 0
    assert "1 not compared: measured on another machine" in capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class SleepConfig(Options):
    """A sleep in one op"""

    milliseconds: int = option(0, "of sleep", minimum=0)


def sleepy(config: SleepConfig) -> Iterator[Result]:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        time.sleep(0.005 + config.milliseconds / 1e3)
        times.append(time.perf_counter() - started)
    yield measured("op", OURS, "time", "s", times)


def test_a_slow_op_is_caught(tmp_path: Path):
    """Really timed, through the runner and the command; a busy machine may take twenty times as long for a sleep."""
    for name, flags in (("before", []), ("same", []), ("slow", ["--milliseconds", "500"])):
        out = ["--out", str(tmp_path / f"{name}.json")]
        assert runner.run("sleepy", [*flags, *out], SleepConfig, sleepy, description="") == 0
    baseline = ["--baseline", str(tmp_path / "before.json"), "--out", str(tmp_path)]
    assert main([str(tmp_path / "same.json"), "--tolerance", "20", *baseline]) == 0
    assert main([str(tmp_path / "slow.json"), "--tolerance", "20", *baseline]) == 1
    assert "1 worse, 0 better" in (tmp_path / "report.md").read_text()


class Page(HTMLParser):
    """Tags that open and close, texts, and anything that would be loaded."""

    VOID = ("meta", "rect", "path", "circle")

    def __init__(self, text: str):
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [f"{name}={value}" for name, value in attrs if name in ("src", "srcset", "data") and value]
        self.loaded += [value for name, value in attrs if name == "href" and value and not value.startswith("#")]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in self.VOID or self.stack.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.text += data


def everything() -> list[Result]:
    """Something for each part of the report."""
    found = []
    for size in (10, 100, 1000):
        found += [seconds(1e-6 * size**2, variant=OURS, size=size), seconds(2e-6 * size, variant="<eager>", size=size)]
    found += [counted("norm", OURS, "moved", "bytes", 110, floor=100, hidden=h, dtype="bf16") for h in (64, 128)]
    found += [measured("copy", OURS, "bandwidth", "GB/s", [1000.0], better="higher"),
              measured("product", OURS, "matrix rate", "TFLOP/s", [100.0], better="higher"),
              measured("product", OURS, "time", "s", [1e-3], flops=5e10, bytes=1e9, hidden=64),
              counted("step", OURS, "calls", "calls", 10), counted("step", "others", "calls", "calls", 25)]  # fmt: skip
    return found


def test_the_page_loads_nothing_and_shows_all(tmp_path: Path):
    write(tmp_path / "a.json", *everything())
    assert main([str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text())
    assert page.stack == [] and page.loaded == []
    assert page.tags.count("figure") == 2  # the growth of step, and the roofline
    for text in ("<eager>: slope 1.00", "trimegatron: slope 2.00, at last 1 s", "2.50 × better", "90.9%", "hidden 128",
                 "50 TFLOP/s", "roof: 1,000 GB/s, 100 TFLOP/s", "No figure here was measured on a GPU."):  # fmt: skip
        assert text in page.text, text
    assert "Left out" not in page.text


def test_plots_without_data_are_left_out_and_said_so(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main([str(write(tmp_path / "a.json", seconds(1.0, 2.0)))]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("Left out: ") == 4
        and "nothing was swept" in out
        and "| step | trimegatron | time | 1.5 s (1 to 2)" in out
    )


def test_the_newest_of_the_same_counts(tmp_path: Path, capsys: pytest.CaptureFixture):
    write(tmp_path / "a.json", seconds(1.0), date="2026-02-01T00:00:00+00:00")
    write(tmp_path / "b.json", seconds(7.0))
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "1 older values of the same figures were left out" in out and "| 1 s |" in out and "| 7 s |" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--results is required"),
        (["RESULTS", "--out", "x.pdf"], r"--out \(x.pdf\) must end in .html or .md"),
        (["RESULTS", "--out", "/nowhere/x.html"], "folder that exists"),
        (["RESULTS", "--readme"], "stands alone"),
        (["/nowhere.json"], "cannot be read"),
    ],
)
def test_wrong_words(words: list[str], message: str, tmp_path: Path):
    path = str(write(tmp_path / "a.json", seconds(1.0)))
    with pytest.raises(ConfigError, match=message):
        main([path if word == "RESULTS" else word for word in words])


def test_ticks():
    assert ticks(*axis([1, 1000])) == [1, 10, 100, 1000]
    assert ticks(*axis([20.0, 20.0])) == [10, 20, 50]
    assert len(ticks(*axis([1e-9, 1e9]))) <= 7


def test_committed_results_are_of_the_form():
    runs = read_runs([readme.RESULTS])
    assert len(runs) == len(list(readme.RESULTS.glob("*.json"))) >= 6
    for path in readme.RESULTS.glob("*.json"):
        assert read_run(path).cases, path


def test_the_readme_is_current():
    """`trimegatron bench report --readme` brings it up to date."""
    text = readme.README.read_text(encoding="utf-8")
    table = readme.readme_table(merge(read_runs([readme.RESULTS]))[0])
    assert readme.with_table(text, table, readme.README) == text


def test_the_readme_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    name = "trimegatron, gigatoken"
    mine = measured("preprocess", name, "rate", "MB/s", [180.0, 182.0], better="higher")
    theirs = dataclasses.replace(mine, variant="gigatoken alone, from memory", values=[200.0])
    sent = [counted("a", OURS, "moved", "bytes", 103, floor=100), counted("b", OURS, "moved", "bytes", 110, floor=100)]
    write(tmp_path / "data.json", mine, theirs, benchmark="data")
    write(tmp_path / "kernels.json", *sent, benchmark="kernels")
    (tmp_path / "README.md").write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    monkeypatch.setattr(readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert main(["--readme"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert (
        text.startswith(f"before\n{readme.BEGIN}\n| |")
        and text.endswith(f"{readme.END}\nafter\n")
        and "old" not in text
    )
    assert "| 181 MB/s | 200 MB/s (gigatoken alone, from memory) | measured ¹ |" in text
    assert "¹ a processor, 2 cores, 2026-01-01, revision abcdef0123" in text
    assert "| 1.03 to 1.10 × | the least there can be (2 cases) | counted |" in text
    assert (
        re.search(r"Not measured yet: .*operator calls of a step", text)
        and "Nothing here was measured on a GPU" in text
    )
    assert main(["--readme"]) == 0 and "is up to date" in capsys.readouterr().out
    (tmp_path / "README.md").write_text("nothing")
    with pytest.raises(ConfigError, match="must have the lines"):
        main(["--readme"])


def test_labels_leave_out_what_follows_from_others():
    results = [counted("norm", OURS, "moved", "bytes", 1, shape=f"{n}", least_bytes=4 * n, width=w, rows=8)
               for n in (1, 2) for w in (3, 5)]  # fmt: skip
    results.append(counted("sum", OURS, "moved", "bytes", 1, shape="1", least_bytes=2, width=3, rows=8))
    assert telling_parameters(results) == ["shape", "width"]
    assert telling_parameters(results, but="shape") == ["width"]
    assert shared_parameters(results) == {"rows": 8}
