"""The conversion benchmark, in small."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from trimegatron.bench.measure import Contender, Figures
from trimegatron.cli import main


def run_here(contender: Contender) -> Figures:
    """What a process of its own would return; the loading of torch in each is left to real runs."""
    module, _, name = contender.function.partition(":")
    return json.loads(json.dumps(getattr(import_module(module), name)(**contender.arguments)))


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Both sources give the same files, the copies count the bytes that they stand for."""
    monkeypatch.setattr(Contender, "run", run_here)
    flags = ["--size", "small", "--rounds", "1", "--work-dir", str(tmp_path / "w"), "--out", str(tmp_path / "f.json")]
    assert main(["bench", "convert", *flags]) == 0
    out = capsys.readouterr().out
    assert "ours to Hugging Face" in out and "× the copy" in out
    report = json.loads((tmp_path / "f.json").read_text())
    made, figures = report["made"], report["figures"]
    assert made["bytes"] == 7 * made["weight_bytes"]
    assert figures["copy of the weights"][0]["megabytes"] * 1e6 == pytest.approx(made["weight_bytes"])
    assert figures["copy of everything"][0]["megabytes"] * 1e6 == pytest.approx(made["bytes"])
    for name in ("ours", "Megatron-LM"):
        written = figures[f"{name} to Hugging Face"][0]["megabytes"] * 1e6
        assert made["weight_bytes"] < written < made["weight_bytes"] + 10_000
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["megatron", "ours"]
