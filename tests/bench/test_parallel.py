"""What a step sends beside the formulas, and that what none explains is told."""

from __future__ import annotations

import dataclasses

import pytest

from trimegatron.bench import parallel
from trimegatron.communication import Message
from trimegatron.config import read_train_args
from trimegatron.dry_run import Walk, assume_vocabulary, walk
from trimegatron.errors import UserError


def walked(flags: str) -> tuple[parallel.Config, Walk]:
    command = read_train_args([*parallel.TINY.split(), "--dry-run", *flags.split()], world_size=1)
    config, _ = assume_vocabulary(command.config)
    return config, walk(config, 0)


def ratios(lines: list[str]) -> dict[str, str]:
    return {line[2:48].strip(): line.split()[-1] for line in lines}


def test_ratios(capsys: pytest.CaptureFixture):
    flags = "--world-size 8 --tensor-model-parallel-size 2 --global-batch-size 24"
    assert parallel.main(flags.split()) == 0
    out = capsys.readouterr().out
    assert "8 ranks: data 4 × tensor 2 × pipeline 1; 3 micro-batches a step" in out
    found = ratios([line for line in out.splitlines() if line.startswith("  ")])
    assert found["layers, embedding, head"] == "1.000" and found["cross entropy"] == "1.000"
    assert float(found["gradients"]) == pytest.approx(1.0, abs=1e-2)  # parameters and shards are aligned
    assert "no message is unexpected" in out


def test_bytes_by_hand():
    """Two sums forward and two backward per layer, one each for the embedding and the head; b·s·h = 2 · 64 · 64."""
    config, step = walked("--world-size 2 --tensor-model-parallel-size 2 --global-batch-size 6")
    formula = next(f for f in parallel.formulas(config, step) if f.what == "layers, embedding, head")
    assert (formula.size, formula.count) == (4 * 2 * 64 * 64, 3 * (4 * 4 + 2))
    assert formula.floor == formula.size * formula.count  # 2 (t-1)/t = 1
    assert step.messages[Message("all-reduce", "tensor", formula.size)] == formula.count


def test_ring_bytes():
    assert Message("all-reduce", "data", 800).sent(4) == 1200
    assert Message("all-gather", "data", 800).sent(4) == Message("reduce-scatter", "data", 800).sent(4) == 600
    assert (Message("send", "pipeline", 800).sent(4), Message("receive", "pipeline", 800).sent(4)) == (800, 0)


def test_what_no_formula_explains(monkeypatch: pytest.MonkeyPatch):
    config, step = walked("--world-size 4 --tensor-model-parallel-size 2")
    expected = parallel.formulas(config, step)
    assert parallel.compare(step, expected)[1] == []
    messages = step.messages.copy()
    messages[Message("broadcast", "data", 4096)] += 2
    messages[Message("all-reduce", "tensor", 4 * 2 * 64 * 64)] += 1
    changed = dataclasses.replace(step, messages=messages)
    assert parallel.compare(changed, expected)[1] == [
        "19 messages for layers, embedding, head on the tensor axis, not 18",
        "2 × broadcast of 4,096 bytes on the data axis, unexplained",
    ]
    monkeypatch.setattr(parallel, "walk", lambda *_, **__: changed)
    with pytest.raises(UserError, match="2 × broadcast of 4,096 bytes on the data axis, unexplained"):
        parallel.main(["--world-size", "4", "--tensor-model-parallel-size", "2"])
