"""The check of a device, as far as it goes without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trimegatron.bench import cli, device_check, device_machine, device_model
from trimegatron.bench.case import Case
from trimegatron.bench.results import Result, counted, measured, read_run
from trimegatron.errors import ConfigError, UserError

ROOT = Path(__file__).parents[2]


def test_it_walks_through_on_a_cpu(tmp_path: Path) -> None:
    """All parts, with the kernels in the interpreter."""
    out = tmp_path / "device.json"
    done = subprocess.run(
        [sys.executable, "-m", "trimegatron.bench.device_check", "--dry-run", "--out", str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for line in (
        " cases right, 0 wrong",
        "ours with CUDA graphs: left out",
        "first 3 losses agree",
        "where we lose",
    ):
        assert line in done.stdout
    found = read_run(out).cases
    values = {(case.case, case.variant, case.figure): case.values for case in found}
    assert values["kernels", "trimegatron", "cases wrong"] == [0] == values["parts", "trimegatron", "left out"]
    (checked,) = (case.parameters["checked"] for case in found if case.figure == "cases wrong")
    assert isinstance(checked, int) and checked > 130
    assert values["copy", "torch", "bandwidth"][0] > 0 and values["product: head", "torch", "matrix rate"][0] > 0
    for dropout in (0.0, 0.1):
        times = {case.variant for case in found if case.figure == "time" and case.parameters["dropout"] == dropout}
        assert times == {"trimegatron", "trimegatron references", "nanoGPT compiled", "nanoGPT compiled again"}
    assert sum(case.case == "trace" and case.figure == "time a step" for case in found) == 10


def case(name: str, offset: float) -> Case:
    return Case(name, "4", lambda: [torch.ones(4)], lambda x: x + offset, lambda x: x, None, 16)


def test_wrong_results_are_told_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def differ(*_: object, **__: object) -> None:
        raise UserError("the losses differ")

    def time_case(timed: Case, *_: object) -> Iterator[Result]:
        yield measured(timed.name, "trimegatron", "call time", "s", [1.0], floor=0.5, shape=timed.shape)

    monkeypatch.setattr(device_check.DeviceCheckConfig, "__post_init__", lambda _: None)
    monkeypatch.setattr(device_check.DeviceCheckConfig, "device", torch.device("cpu"))
    monkeypatch.setattr(device_check, "checked_cases", lambda _: [[case("right", 0.0), case("bad", 1.0)]])
    monkeypatch.setattr(device_check, "timed_cases", lambda _: [case("right", 0.0), case("bad", 1.0)])
    monkeypatch.setattr(device_check, "WORKING_SET", 1 << 10)
    monkeypatch.setattr(device_check.device_kernels, "time_case", time_case)
    monkeypatch.setattr(device_machine, "matrix_rates", lambda *_: [])
    monkeypatch.setattr(device_model, "run_rounds", differ)
    assert cli.main(["device-check", "--out", str(tmp_path / "a.json")]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG: bad 4 [0]") == 2 and printed.count("WRONG: the losses differ") == 2
    found = read_run(tmp_path / "a.json").cases
    assert [result.case for result in found if result.figure == "call time"] == ["right"]


def test_what_the_time_did_not_suffice_for_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = device_check.DeviceCheckConfig.__new__(device_check.DeviceCheckConfig)
    monkeypatch.setattr(device_check, "checked_cases", lambda _: [[case("first", 0.0)], [case("second", 0.0)]])
    monkeypatch.setattr(device_check, "timed_cases", lambda _: [case("third", 0.0)])
    budget = device_check.Budget(-1.0)
    (result,) = device_check.check_kernels(config, budget, [])
    assert result.parameters["checked"] == 1
    assert not list(device_check.time_kernels(config, budget, [], 1.0, torch.empty(1)))
    assert not list(device_check.model_rounds(config, budget, []))
    lines = [line.removeprefix("left out, the time is up: ") for line in capsys.readouterr().out.splitlines()]
    expected = ["second 4", "time of third 4", "codeparrot-small at dropout 0, codeparrot-small at dropout 0.1"]
    assert set(expected) <= set(lines) and budget.left_out == ", ".join(expected).split(", ")


def test_where_we_lose() -> None:
    def time(variant: str, seconds: float, shape: str, figure: str = "time") -> Result:
        return measured("norm", variant, figure, "s", [seconds], shape=shape)

    found = [time("trimegatron", 2.0, "a"), time("eager", 1.0, "a"), time("compile", 0.5, "a"), time("liger", 3.0, "a"),
             time("trimegatron", 1.0, "b"), time("eager", 2.0, "b"), time("eager", 0.1, "b", "call time"),
             counted("norm", "eager", "launches", "", 1)]  # fmt: skip
    lines = ["norm a: compile is 4.00 times as fast", "norm a: eager is 2.00 times as fast"]
    assert list(device_check.where_we_lose(found)) == lines


def test_clocks_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '580.1, 1980 MHz, 1980 MHz, 3201 MHz, 3201 MHz, 700.00 W, 31'\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_machine.clocks().startswith("clocks unknown")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert "driver_version 580.1, clocks.sm 1980 MHz" in device_machine.clocks()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said() -> None:
    with pytest.raises(ConfigError, match="must have a GPU"):
        cli.main(["device-check"])
