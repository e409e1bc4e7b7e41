"""``trimegatron bench checkpoint`` on a small model: what it counts is what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimegatron.bench import checkpoint
from trimegatron.bench.measure import Contender
from trimegatron.bench.results import read_run

SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 16 --vocab-size 500"


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """In this process, to save the start of eleven."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        Contender, "run", lambda self: getattr(checkpoint, self.function.split(":")[1])(**self.arguments)
    )
    assert checkpoint.main([*SMALL.split(), "--rounds", "2", "--work-dir", str(tmp_path), "--out", str(out)]) == 0
    found = read_run(out)
    out.unlink()
    assert not list(tmp_path.iterdir())
    times = [case for case in found.cases if case.figure == "time"]
    assert len(times) == 5 and all(len(case.values) == 2 and case.parameters["num_layers"] == 1 for case in times)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("write", "save ", "read", "load"))
    ]
    assert [line[:28].strip() for line in lines] == ["write", "save", "read", "load", "load, hashes not compared"]
    ratios = [float(line.split()[-2]) for line in lines]
    assert ratios[0] == ratios[2] == 1.0


def test_the_bytes(tmp_path: Path):
    """Weights in bf16, masters and two moments in fp32: 14 bytes a parameter, and headers."""
    sizes = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "vocab_size": 500,
    }
    figures = checkpoint.save(folder=str(tmp_path), **sizes)
    layer = 12 * 32 * 32 + 13 * 32
    assert 0 <= figures["bytes"] - 14 * (516 * 32 + layer + 2 * 32) < 20_000
    assert checkpoint.load(folder=str(tmp_path), **sizes)["bytes"] == figures["bytes"]
