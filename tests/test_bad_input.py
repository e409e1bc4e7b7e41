"""What a user gets wrong: one clear line, the documented exit code, no traceback, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import tiny_flags
from trimegatron.cli import main as cli


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"learning_rate": 0.1}, 2, ["--learning-rate"]),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "no.json", "merge_file": "no.txt"},
            2,
            ["vocab", "no.json"],
        ),
        ({"seq_length": 32}, 2, ["--seq-length (32)", "--max-position-embeddings (16)"]),
        ({"data_path": "nowhere"}, 2, ["--data-path (nowhere)"]),
        ({"load": "nothing"}, 4, ["--load (nothing)"]),
        ({"split": "0,100,0"}, 3, ["train"]),
        ({"pipeline_model_parallel_size": 2}, 2, ["pipeline"]),
        ({"save": "out"}, 2, ["save-interval"]),
        ({"attention_backend": "sdpa"}, 2, ["--attention-backend (sdpa)", "--attention-dropout 0"]),
        ({"attention_backend": "flash"}, 2, ["--attention-backend (flash)", "needs a GPU"]),
        ({"attention_backend": "flash", "kernels": "reference"}, 2, ["--attention-backend (flash)", "--kernels"]),
        (
            {"attention_backend": "flash", "kv_channels": 136},
            2,
            ["--attention-backend (flash)", "--kv-channels is 136"],
        ),
        ({"device": "cuda"}, 2, ["--device (cuda)"]),
        ({"kernels": "triton"}, 2, ["--kernels (triton)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_training(changes: dict, code: int, said: list[str], corpus: Path, tmp_path: Path):
    result = run("trimegatron", "train", *tiny_flags(corpus, **changes), cwd=tmp_path)
    assert result.returncode == code, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("trimegatron train: error: ")
    for word in said:
        assert word in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_several_ranks_speak_once_and_stop(corpus: Path, tmp_path: Path):
    """Under `trimegatron train` with 2 processes the worker's exit code comes through, and one message."""
    flags = tiny_flags(corpus, load="nothing", tensor_model_parallel_size=2)
    result = run("trimegatron", "train", "--nproc-per-node", "2", *flags, cwd=tmp_path)
    assert result.returncode == 4
    assert result.stderr.count("--load (nothing)") == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_several_ranks_with_a_wrong_configuration_start_nothing(corpus: Path, tmp_path: Path):
    flags = tiny_flags(corpus, num_attention_heads=1, tensor_model_parallel_size=2)
    result = run("trimegatron", "train", "--nproc-per-node=2", *flags, cwd=tmp_path)
    assert result.returncode == 2
    assert "--num-attention-heads (1) must be a multiple of --tensor-model-parallel-size (2)" in result.stderr
    assert result.stderr.count("error") == 1 and "Traceback" not in result.stderr


def test_divergence(corpus: Path, tmp_path: Path):
    """A rate that blows up: exit code 5, the iteration and the samples named."""
    flags = tiny_flags(corpus, lr=1e30, lr_warmup_iters=0, clip_grad=0.0)
    result = run("trimegatron", "train", *flags, cwd=tmp_path)
    assert result.returncode == 5, result.stdout
    assert "training diverged at iteration" in result.stderr and "samples" in result.stderr
    assert "Traceback" not in result.stderr


def test_wrong_key_and_broken_line(tmp_path: Path):
    gpt2 = Path(__file__).parent / "golden" / "gpt2"
    flags = (
        f"--output-prefix out --tokenizer-type GPT2BPETokenizer --vocab {gpt2}/vocab.json --merge {gpt2}/merges.txt "
        "--append-eod --workers 1 --json-keys content --input"
    )
    for text, said in (
        ('{"text": "ab"}\n', ["data.jsonl:1", "content", "text"]),
        ('{"content": "ab"}\n{"cont', ["data.jsonl:2"]),
    ):
        (tmp_path / "data.jsonl").write_text(text)
        result = run("trimegatron", "preprocess", *flags.split(), "data.jsonl", cwd=tmp_path)
        assert result.returncode == 3, result.stderr
        assert "Traceback" not in result.stderr
        for word in said:
            assert word in result.stderr
        assert not list(tmp_path.glob("*out*"))


def test_commands(capsys: pytest.CaptureFixture):
    assert cli(["trian"]) == 2
    assert "train" in capsys.readouterr().err
    assert cli([]) == 2
    assert cli(["--help"]) == 0
    assert cli(["--version"]) == 0
    assert cli(["train", "--nproc-per-node", "many"]) == 2
    assert "--nproc-per-node (many)" in capsys.readouterr().err
    assert os.environ.get("RANK") is None
