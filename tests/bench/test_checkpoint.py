"""``trimegatron bench checkpoint`` on a small model: what it counts is what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimegatron.bench import checkpoint
from trimegatron.bench.measure import Contender
from trimegatron.bench.results import read_run

SMALL = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --max-position-embeddings 16 --vocab-size 500"


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """In this process, to save the start of fifteen."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(
        Contender, "run", lambda self: getattr(checkpoint, self.function.split(":")[1])(**self.arguments)
    )
    assert checkpoint.main([*SMALL.split(), "--rounds", "2", "--work-dir", str(tmp_path), "--out", str(out)]) == 0
    found = read_run(out)
    out.unlink()
    assert not list(tmp_path.iterdir())
    times = {(case.case, case.variant): case for case in found.cases if case.figure == "time"}
    assert set(times) == {(case, variant) for case, variant, _ in checkpoint.CASES.values()} | {
        ("pause of training", "trimegatron, without --async-save")
    }
    for case in times.values():
        assert len(case.values) == 2 and min(case.values) > 0 and case.parameters["num_layers"] == 1
    ours, save = times["pause of training", "trimegatron"], times["save beside training", "trimegatron"]
    assert all(pause < whole for pause, whole in zip(ours.values, save.values, strict=True))
    lines = capsys.readouterr().out.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("write")) :][: len(checkpoint.CASES)]
    assert [line[:28].strip() for line in lines] == list(checkpoint.CASES)
    ratios = {name: float(line[52:58]) for name, line in zip(checkpoint.CASES, lines, strict=True)}
    assert {ratios[base] for _, _, base in checkpoint.CASES.values()} == {1.0}


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
    beside = checkpoint.save_beside(folder=str(tmp_path / "beside"), **sizes)
    assert {name: found["bytes"] for name, found in beside.items()} == dict.fromkeys(
        checkpoint.BESIDE, figures["bytes"]
    )
