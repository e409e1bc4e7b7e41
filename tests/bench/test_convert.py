"""The conversion benchmark, in small."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from trimegatron.bench.measure import Contender, Figures
from trimegatron.bench.results import read_run
from trimegatron.cli import main

COPY = "a copy of as many bytes"


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
    cases = read_run(tmp_path / "f.json").cases
    assert len(cases) == 3 * 5 and all(min(case.values) > 0 for case in cases if case.figure == "time")
    written = {(case.case, case.variant): case.median for case in cases if case.figure == "written"}
    weights, everything = written["to Hugging Face", COPY], written["from Megatron-LM with the optimizer", COPY]
    assert everything == 7 * weights
    for source in ("our checkpoint", "Megatron-LM's"):
        assert weights < written["to Hugging Face", f"trimegatron, from {source}"] < weights + 10_000
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["megatron", "ours"]
