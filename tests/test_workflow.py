"""The four steps as a user types them, in subprocesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel import free_port
from trimegatron import demo
from trimegatron.preprocess.tokenizer_cli import main as tokenizer_main

ROOT = Path(__file__).parent.parent


def environment(**extra: str) -> dict[str, str]:
    """The tests' own environment with its commands first on the path, and no network."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"} | extra


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 80 modules of the standard library as loose JSON, and a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("modules")
    names = sorted(Path(os.__file__).parent.glob("*.py"))[:80]
    texts = [name.read_text(encoding="utf-8") for name in names]
    (folder / "codeparrot_data.json").write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    line = f"--input {folder}/codeparrot_data.json --json-keys content --vocab-size 600 --output {folder}"
    assert tokenizer_main(["train", *line.split()]) == 0
    return folder


def test_codeparrots_commands(modules: Path, tmp_path: Path):
    """docs/codeparrot.sh in small: the blog's lines, torchrun with 2 processes, tensor parallel 2, fp16,
    TensorBoard, conversion.
    """
    for name in ("codeparrot_data.json", "vocab.json", "merges.txt"):
        (tmp_path / name).symlink_to(modules / name)
    result = subprocess.run(
        ["bash", str(ROOT / "docs" / "codeparrot.sh")],
        cwd=tmp_path,
        env=environment(SMALL="1", MASTER_PORT=str(free_port())),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "greedy agreement 100.00%" in result.stdout
    lines = [json.loads(x) for x in (tmp_path / "experiments/codeparrot-small/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "split" not in line]
    # fp16 starts at a scale of 2^32: the first steps overflow and are skipped until gradients fit, as in Megatron.
    assert steps[0]["skipped"] > 0 and steps[-1]["skipped"] == 0
    assert steps[-1]["lm_loss"] < 6.4  # it starts at ln 600
    assert [line["iteration"] for line in lines if line.get("split") == "valid"] == [20, 40]
    assert "going on without a test set" in result.stdout  # 0.1 % of 80 documents is none
    assert list((tmp_path / "experiments/tensorboard").glob("events.*"))
    assert (tmp_path / "experiments/codeparrot-small/iter_0000040/manifest.json").is_file()
    assert (tmp_path / "codeparrot-small/model.safetensors").is_file()


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Every step of `trimegatron demo`, with a toy model."""
    toy = demo.Scale(
        "toy",
        num_processes=2,
        vocab_size=400,
        flags="--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 64 --max-position-embeddings 64 "
        "--micro-batch-size 8 --global-batch-size 8 --train-iters 20 --lr 0.01 --min-lr 0.001 --lr-warmup-iters 2 "
        "--eval-interval 10 --eval-iters 1 --log-interval 10",
    )
    monkeypatch.setattr(demo, "choose_scale", lambda: toy)
    monkeypatch.setattr(demo.sysconfig, "get_path", lambda _: str(Path(json.__file__).parent.parent / "test"))
    monkeypatch.setattr(demo, "MINIMUM_MODULES", 1)
    monkeypatch.setattr(demo, "standard_library", lambda root: sorted(root.glob("test_[a-c]*.py"))[:40])
    assert demo.main(["--out", str(tmp_path / "demo")]) == 0
    out = capfd.readouterr().out
    assert "$ torchrun --nproc-per-node 2 -m trimegatron.train --tensor-model-parallel-size 2" in out
    assert "greedy agreement 100.00%" in out
    assert "Validation loss" in out
    first, last = demo.validation_losses(tmp_path / "demo" / "checkpoints" / "metrics.jsonl")
    assert first["iteration"] == 0 and last["lm_loss"] < first["lm_loss"]
    assert last["bits_per_byte"] < first["bits_per_byte"]


def test_demo_does_not_touch_what_is_there(tmp_path: Path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(demo.ConfigError, match="must not exist yet"):
        demo.main(["--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
