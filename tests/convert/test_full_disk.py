"""A disk that is full while a conversion writes: exit code 4, one line, nothing left behind."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from tests.convert.models import random_source
from tests.parallel import run_ranks
from trimegatron.cli import main
from trimegatron.convert.to_megatron import write_megatron
from trimegatron.convert.to_ours import write_checkpoint


def run_all(commands: list[list[str]]) -> list[int]:
    """No file may grow beyond 50 kB."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    return [main(["convert", *command]) for command in commands]


def test_a_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture):
    write_checkpoint(random_source(), tmp_path / "ours", verify=False)
    write_megatron(random_source(), tmp_path / "megatron", tp=1, pp=1, verify=False)
    ours, megatron, out = str(tmp_path / "ours"), str(tmp_path / "megatron"), str(tmp_path / "out")
    commands = [
        ["to-hf", "--load", ours, "--output", out],
        ["to-hf", "--load", ours, "--output", out, "--format", "bin"],
        ["from-megatron", "--load", megatron, "--save", out],
        ["to-megatron", "--load", ours, "--save", out],
    ]
    assert run_ranks(1, run_all, commands) == [[4, 4, 4, 4]]
    error = capfd.readouterr().err
    assert error.count("the conversion failed and left nothing behind") == 4 and "Traceback" not in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron", "ours"]
