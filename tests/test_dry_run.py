"""--dry-run: sizes, messages and errors of a layout, without its data, memory or processes."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import run_ranks
from tests.runs import tiny_flags, write_corpus
from trimegatron import dry_run, train
from trimegatron.cli import main as cli
from trimegatron.communication import CommunicationRecorder
from trimegatron.config import read_train_args
from trimegatron.errors import ConfigError
from trimegatron.mesh import close_mesh, init_mesh, launched_world_size
from trimegatron.preflight import with_vocab_size
from trimegatron.tokenizer import build_tokenizer

GPT2 = {"tokenizer_type": "GPT2BPETokenizer", "vocab_size": None}


def test_a_layout_of_many_processes(capfd: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """1024 processes: no file exists, none is written."""
    monkeypatch.chdir(tmp_path)
    flags = tiny_flags(
        Path("nowhere"),
        num_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        global_batch_size=1536,
        tensor_model_parallel_size=4,
        save="out",
        save_interval=5,
        bf16=True,
        make_vocab_size_divisible_by=128,
        **GPT2,
    )
    assert cli(["train", *flags, "--dry-run", "--world-size", "1024"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    for part in (
        "note: not there, so not checked: --data-path (nowhere) must be the prefix",
        "note: not there, so not checked: --vocab-file is required",
        "note: the vocabulary is assumed to have 50257 words",
        "dry run of 1024 processes: data 256 × tensor 4 × pipeline 1 parallel; 3 micro-batches of 2 × 16 tokens a step",
        "rank 0 (pipeline 0, data 0, tensor 0): layers 0–11,",
    ):
        assert part in out
    # 50688 / 4 rows of words, 16 of positions; per layer 12 h²/4 + (3 + 4)/4 h + 6 h; final norm 2 h
    h = 768
    parameters = 12672 * h + 16 * h + 12 * (12 * h * h // 4 + 7 * h // 4 + 6 * h) + 2 * h
    assert f"layers 0–11, {parameters:,} parameters" in out
    # bf16 weights, fp32 gradients, fp32 master and two moments, and what makes 256 equal shards of each bucket
    found = re.search(r"weights (\S+) GiB, gradients (\S+) GiB, optimizer (\S+) GiB, activations", out)
    assert found is not None
    for size, num_bytes in zip(found.groups(), (2, 4, 12), strict=True):
        assert float(size) == pytest.approx(num_bytes * parameters / 2**30, rel=0.03)
    assert "  tensor     all-reduce          150 a step," in out  # 3 × (4 · 12 + 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "world_size", "said"),
    [
        ({"tensor_model_parallel_size": 3}, 8, "must divide the number of processes"),
        ({"tensor_model_parallel_size": 8}, 8, "--num-attention-heads (4) must be a multiple of"),
        ({"global_batch_size": 24}, 32, "--global-batch-size (24) must be a multiple of"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": None}, 2, "Give --vocab-size"),
    ],
)
def test_what_cannot_work(changes: dict, world_size: int, said: str, capfd: pytest.CaptureFixture):
    flags = tiny_flags(Path("nowhere"), **changes)
    assert train.main([*flags, "--dry-run", "--world-size", str(world_size)]) == 2
    assert said in capfd.readouterr().err
    assert not torch.distributed.is_initialized()


def test_an_error_of_the_step_is_told(monkeypatch: pytest.MonkeyPatch):
    command = read_train_args([*tiny_flags(Path("nowhere")), "--dry-run"], world_size=1)
    config, _ = dry_run.assume_vocabulary(command.config)
    monkeypatch.setattr(train.Trainer, "sum_over_ranks", lambda *_, **__: torch.ones(3).view(2, 2))
    with pytest.raises(ConfigError, match=r"--dry-run: rank 0 cannot step: RuntimeError: shape '\[2, 2\]'"):
        dry_run.walk(config, 0)


def test_world_size_alone(capfd: pytest.CaptureFixture):
    assert train.main([*tiny_flags(Path("nowhere")), "--world-size", "8"]) == 2
    assert "--world-size (8) needs --dry-run" in capfd.readouterr().err


def test_number_of_processes_of_the_launcher(capfd: pytest.CaptureFixture):
    assert cli(["train", "--nproc-per-node", "4", "--dry-run", *tiny_flags(Path("nowhere"))]) == 0
    assert "dry run of 4 processes: data 4 ×" in capfd.readouterr().out


def walked(*, world_size: int = 1, **changes: Any) -> dry_run.Walk:
    flags = tiny_flags(Path("nowhere"), **changes)
    command = read_train_args([*flags, "--dry-run", "--world-size", str(world_size)], world_size=1)
    config, _ = dry_run.assume_vocabulary(command.config)
    return dry_run.walk(config, 0)


def test_activations_are_what_a_layer_keeps():
    """A layer keeps at most the published 34 s·b·h bytes in bf16, and with torch's attention no square of s."""

    def live(num_layers: int, seq_length: int) -> int:
        sizes = {"num_layers": num_layers, "seq_length": seq_length, "max_position_embeddings": seq_length}
        sizes |= {"hidden_size": 1024, "attention_dropout": 0.0, "hidden_dropout": 0.0, "vocab_size": 9}
        return walked(bf16=True, **sizes).activation_bytes

    per_layer = {s: (live(6, s) - live(2, s)) / 4 for s in (512, 1024)}
    assert per_layer[1024] == pytest.approx(2 * per_layer[512], rel=1e-2)
    assert 16 < per_layer[1024] / (1024 * 2 * 1024) < 34.1  # and a few numbers a token


def test_activations_of_layers_that_are_run_again():
    """All layers replayed at once are all there in backward; one by one, one of them and what enters each."""
    sizes = {"num_layers": 8, "hidden_size": 64, "seq_length": 64, "max_position_embeddings": 64, "vocab_size": 9}
    full = {"recompute_granularity": "full", "recompute_method": "uniform"}
    plain, at_once, each = (
        walked(**sizes, **changes).activation_bytes for changes in ({}, full | {"recompute_num_layers": 8}, full)
    )
    assert at_once == plain
    assert each < plain / 2


def test_receive_buffers_count():
    """1F1B keeps as many micro-batches as there are stages, but torch a receive buffer of each one."""
    sizes = {"hidden_size": 64, "seq_length": 64, "max_position_embeddings": 64, "vocab_size": 9}
    few, many = (
        walked(world_size=2, pipeline_model_parallel_size=2, global_batch_size=2 * m, **sizes).activation_bytes
        for m in (8, 24)
    )
    activation = 64 * 2 * 64 * 4
    assert (many - few) / (16 * activation) == pytest.approx(1, rel=0.1)  # and the samples themselves


def test_a_ramp_is_walked_at_its_full_batch():
    ramp = {"train_iters": None, "lr_decay_iters": None, "lr_warmup_iters": None, "train_samples": 400}
    ramp |= {"rampup_batch_size": [4, 4, 60], "global_batch_size": 16}
    layout = {"world_size": 2, "pipeline_model_parallel_size": 2}
    sent = Counter({message.kind: n for message, n in walked(**layout, **ramp).messages.items()})
    assert sent["send"] == 8  # activations of 16 / 2 micro-batches


def recorded_by_gloo(flags: list[str]) -> list[Any]:
    """The messages of the second step of a real run, on one of its ranks."""
    config = read_train_args(flags, world_size=launched_world_size()).config
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.model.vocab_size)
    config = with_vocab_size(config, tokenizer)
    size = config.parallel.tensor_model_parallel_size
    mesh = init_mesh(torch.device("cpu"), tensor_parallel_size=size)
    try:
        trainer = train.build_trainer(config, mesh, tokenizer, None, lambda line: None)
        batches = trainer.loader(trainer.datasets.train, 0)
        trainer.train_step(batches)
        with CommunicationRecorder(mesh) as recorder:
            trainer.train_step(batches)
        return sorted([*message, count] for message, count in recorder.messages.items())
    finally:
        close_mesh()


def test_messages_are_those_of_a_real_run(tmp_path: Path):
    """4 gloo processes, data × tensor 2 × 2: the same messages, number by number, as under the fake group."""
    write_corpus(tmp_path / "text")
    flags = tiny_flags(tmp_path / "text", tensor_model_parallel_size=2)
    ranks = run_ranks(4, recorded_by_gloo, flags)
    command = read_train_args([*flags, "--dry-run", "--world-size", "4"], world_size=1)
    config, _ = dry_run.assume_vocabulary(command.config)
    for rank, real in enumerate(ranks):
        dry = dry_run.walk(config, rank).messages
        assert sorted([*message, count] for message, count in dry.items()) == real
    assert {message[1] for message in ranks[0]} == {"world", "data", "tensor"}
