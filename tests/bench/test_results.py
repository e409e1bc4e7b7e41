"""The one form of all results, and the runner that writes it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trimegatron.bench import cli, results, runner
from trimegatron.bench.growth import growths
from trimegatron.bench.results import Result, Run, counted, measured, read_run, read_runs, write_run
from trimegatron.bench.show import show_result, show_value
from trimegatron.config.options import Options, option
from trimegatron.errors import ConfigError, UserError


@dataclass(frozen=True, kw_only=True)
class SizeConfig(Options):
    """Sizes"""

    size: int = option(10, "elements", minimum=1)
    many: list[int] = option([1, 2], "several", minimum=1)


def squares(config: SizeConfig) -> Iterator[Result]:
    for many in config.many:
        yield counted("square", "trimegatron", "moved", "bytes", 8 * config.size**2, floor=8, many=many)
    yield measured("wait", "trimegatron", "time", "s", [1e-3 * config.size, 2e-3, 3e-3], better="higher")


def run(*argv: str, found: Callable[[Any], Iterator[Result]] = squares, **rest: Any) -> int:
    return runner.run("squares", list(argv), SizeConfig, found, description="Squares.", **rest)


def test_a_run_is_read_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "squares.json"
    assert run("--size", "5", "--out", str(out), packages=("pytest",)) == 0
    found = read_run(out)
    assert found.cases == list(squares(SizeConfig(size=5)))
    assert found.command == ["trimegatron", "bench", "squares", "--size", "5", "--out", str(out)]
    assert found.versions["pytest"] == pytest.__version__ and found.machine["cores"] >= 1
    assert read_runs([tmp_path, out]) == [found, found]
    printed = capsys.readouterr().out
    assert "200 bytes  25.000 × the least" in printed and "3 ms (2 to 5)" in printed and "3 figures" in printed


def test_a_sweep_and_its_slope(tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "a.json"
    assert run("--sweep", "size", "--out", str(out), sweeps={"size": (1, 10, 1000)}) == 0
    assert "square, trimegatron, moved · many 2 ∝ size^2.00 from 1 to 1,000" in capsys.readouterr().out
    assert [case.parameters["size"] for case in read_run(out).cases[::3]] == [1, 10, 1000]
    assert {(g.dimension, g.first.case) for g in growths(read_run(out).cases)} == {("size", "square"), ("size", "wait")}
    assert run("--sweep", "many", "3", "30", "300") == 0
    assert "2 of 2 series do not change, 0 follow no power of what was swept" in capsys.readouterr().out
    for words, message in (
        (["width"], r"--sweep \(width\) must be a whole-number option of this benchmark: size, many"),
        (["many"], "needs values"),
        (["size", "x"], r"--size \(x\) must be a whole number"),
        (["size", "0"], r"--size \(0\) must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            run("--sweep", *words)


def test_nothing_is_written_when_a_result_is_wrong(tmp_path: Path):
    """A benchmark that finds a wrong result raises before it times."""

    def wrong(config: SizeConfig) -> Iterator[Result]:
        yield from squares(config)
        raise UserError("the losses differ")

    with pytest.raises(UserError, match="losses differ"):
        run("--out", str(tmp_path / "a.json"), found=wrong)
    with pytest.raises(ConfigError, match="folder that exists"):
        run("--out", str(tmp_path / "nowhere" / "a.json"))
    with pytest.raises(ConfigError, match="is there twice"):
        run("--many", "1", "1", "--out", str(tmp_path / "a.json"))
    assert not list(tmp_path.iterdir())


def example() -> dict[str, Any]:
    case = counted("a", "trimegatron", "moved", "bytes", 1.0, hidden=3)
    run = Run("x", "2026-01-01T00:00:00+00:00", None, False, {}, {}, [], [case])
    return {"format": results.FORMAT} | dataclasses.asdict(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("date"), "must be an object of"),
        (lambda found: found.update(format=2), r"format \(2\) must be 1"),
        (lambda found: found.update(dirty="no"), "dirty .*wrong type"),
        (lambda found: found["cases"][0].update(values=[]), "finite numbers"),
        (lambda found: found["cases"][0].update(values=[float("nan")]), "finite numbers"),
        (lambda found: found["cases"][0].update(values=[True]), "finite numbers"),
        (lambda found: found["cases"][0].update(better="more"), "'lower' or 'higher'"),
        (lambda found: found["cases"][0].update(floor="0"), "wrong type"),
        (lambda found: found["cases"][0]["parameters"].update(hidden=[1]), "texts, numbers"),
        (lambda found: found["cases"].append(found["cases"][0]), "is there twice"),
    ],
)
def test_what_is_not_of_the_form_is_refused(change: Callable[[Any], Any], message: str, tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(example()))
    assert read_run(path).cases[0].parameters == {"hidden": 3}
    found = example()
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=f"a.json.*{message}"):
        read_run(path)


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no JSON file"):
        read_runs([tmp_path])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_runs([tmp_path / "a.json"])
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_runs([tmp_path])
    bad = dataclasses.replace(Run(**{k: v for k, v in example().items() if k != "format"}), cases=[])
    write_run(bad, tmp_path / "a.json")
    assert read_run(tmp_path / "a.json").cases == []


@pytest.mark.parametrize("name", sorted(cli.BENCHMARKS))
def test_every_benchmark_writes_results(name: str, capsys: pytest.CaptureFixture):
    with suppress(SystemExit):
        assert cli.main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "--out FILE" in printed and "--sweep" in printed


def test_values_are_shown_with_prefixes():
    assert show_value(0.0123456, "s") == "12.35 ms" and show_value(2.5e9, "bytes") == "2.5 GB"
    assert show_value(123456.7, "samples/s") == "123,457 samples/s" and show_value(0.0, "s") == "0 s"
    line = show_result(measured("copy", "eager", "bandwidth", "GB/s", [80.0], better="higher", floor=100.0, wide=True))
    assert "80 GB/s  80.0% of the most  [wide yes]" in line
