"""``trimegatron checkpoint resume-check``: it finds what is exact, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.runs import tiny_flags, write_corpus
from trimegatron.checkpoint import resume_check
from trimegatron.cli import main


def test_exact_and_not(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Two ranks, killed with their launcher; then, where one bit of the end is changed, it is found."""
    write_corpus(tmp_path / "text")
    flags = tiny_flags(tmp_path / "text", save=tmp_path / "runs" / "mine", save_interval=1000, train_iters=100)
    flags += ["--steps", "12", "--kill-after", "3", "--use-distributed-optimizer", "--nproc-per-node", "2"]
    compared = []
    monkeypatch.setattr(resume_check, "verdict", lambda runs: compared.append(runs) or 0)
    assert main(["checkpoint", "resume-check", *flags]) == 0
    monkeypatch.undo()
    (runs,) = compared
    assert "resumed: from the checkpoint at " in capfd.readouterr().out
    change_a_bit(runs.folder / "resumed" / "iter_0000012")
    assert resume_check.verdict(runs) == 4
    out = capfd.readouterr().out
    assert "  model.final_layernorm.weight: 1 of 32 elements differ, max |Δ| " in out and "NOT EXACT" in out
    change_a_bit(runs.folder / "straight" / "iter_0000012")
    assert resume_check.verdict(runs) == 0
    assert "exact: steps 1 to 12, killed and resumed, are those of the straight run" in capfd.readouterr().out
    assert not list((tmp_path / "runs").iterdir())


def change_a_bit(folder: Path) -> None:
    """Of one weight."""
    name = "model.final_layernorm.weight"
    for shard in folder.glob("shard-*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].view(torch.int32)[0] ^= 1
            with safe_open(shard, framework="pt") as file:
                metadata = file.metadata()
            save_file(tensors, shard, metadata=metadata)


def test_what_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_corpus(tmp_path / "text")
    flags = tiny_flags(tmp_path / "text")
    assert main(["checkpoint", "resume-check", *flags, "--steps", "21"]) == 2
    assert "must fit between iteration 0 and the end of the run, 20" in capsys.readouterr().err
    assert main(["checkpoint", "resume-check", *flags, "--steps", "4", "--kill-after", "4"]) == 2
    assert main(["checkpoint", "resume-check", *flags, "--hidden-size", "33"]) == 2
    assert "--num-attention-heads" in capsys.readouterr().err
