"""Folders that appear whole or not at all, and the bar."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.convert.models import random_source
from trimegatron.convert import output
from trimegatron.convert.output import Progress, whole_folder
from trimegatron.convert.to_ours import write_checkpoint
from trimegatron.errors import ConfigError


def test_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "new" / "out"
    with pytest.raises(RuntimeError, match="half-way"), whole_folder(target, "--save") as folder:
        (folder / "a").touch()
        assert not target.exists()
        raise RuntimeError("half-way")
    assert list(tmp_path.iterdir()) == []  # the folder above went too
    target.mkdir(parents=True)  # an empty folder is free
    with whole_folder(target, "--save") as folder:
        (folder / "a").touch()
    assert [path.name for path in target.iterdir()] == ["a"]
    with pytest.raises(ConfigError, match=r"--save .* must not exist yet, or be empty"), whole_folder(target, "--save"):
        pass


def test_the_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """On a terminal one line that is drawn again; elsewhere a line now and then, so none here."""
    bar = Progress(100, "writing")
    bar.count(50)
    bar.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    bar = Progress(100, "writing")
    bar.said_at -= 1
    bar.count(50)
    bar.count(50)
    bar.close()
    lines = capsys.readouterr().err.split("\r")
    assert len(lines) == 3 and lines[-1].endswith("\n")
    assert f"[{'#' * 15}{' ' * 15}]  50%" in lines[1] and f"[{'#' * 30}] 100%" in lines[2]
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    monkeypatch.setattr(output, "SECONDS_BETWEEN_LINES", 0.0)
    bar = Progress(100, "writing")
    bar.count(10)
    assert capsys.readouterr().err.count("\n") == 1


def test_termination_leaves_nothing(tmp_path: Path):
    """SIGTERM while the proof runs: exit code 143, and neither the folder nor a temporary one stays."""
    write_checkpoint(random_source(with_optimizer=False), tmp_path / "ours", verify=False)
    command = ["convert", "to-hf", "--load", str(tmp_path / "ours"), "--output", str(tmp_path / "new" / "hf")]
    process = subprocess.Popen(
        [sys.executable, "-m", "trimegatron", *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list(tmp_path.glob("new/.hf.*.tmp/generation_config.json")):
        time.sleep(0.01)
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert (process.returncode, [path.name for path in tmp_path.iterdir()]) == (143, ["ours"]), said
    assert "terminated" in said
