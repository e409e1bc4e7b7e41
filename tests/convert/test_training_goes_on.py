"""Training on from what was converted: Megatron-LM's own losses, and any layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.convert.models import random_source
from tests.parallel import run_ranks
from tests.runs import tiny_flags, train_tiny
from tests.test_golden_curve import Rows
from trimegatron import train
from trimegatron.checkpoint.directory import require_checkpoint
from trimegatron.cli import main
from trimegatron.config import parse_train_args
from trimegatron.convert.from_hf import convert_from_hf
from trimegatron.convert.from_megatron import read_megatron
from trimegatron.convert.to_hf import write_hf
from trimegatron.convert.to_megatron import write_megatron
from trimegatron.convert.to_ours import write_checkpoint
from trimegatron.convert.vocabulary import VocabularyConfig
from trimegatron.data.build import Datasets
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.mesh import close_mesh, init_mesh, launched_world_size, select_device
from trimegatron.preflight import with_vocab_size
from trimegatron.tokenizer import build_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoints"


MICRO = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "make_vocab_size_divisible_by": 128,
    "vocab_size": 127,  # and the end token: the golden run's padded vocabulary, all of which takes probability there
    "split": "100,0,0",
    "lr_warmup_iters": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "log_interval": 100,
    "megatron_compat": 2022,
}


def go_on(flags: list[str], prefix: Path, tensor_parallel_size: int, last: int = 20) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps that are left up to ``last``, on one rank."""
    device = select_device("cpu")
    config = parse_train_args(flags, world_size=launched_world_size())
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.model.vocab_size)
    config = with_vocab_size(config, tokenizer)
    mesh = init_mesh(device, tensor_parallel_size=tensor_parallel_size)
    try:
        checkpoint = require_checkpoint(Path(config.checkpoint.load or ""))
        trainer = train.build_trainer(config, mesh, tokenizer, checkpoint, lambda line: None)
        trainer.datasets = Datasets(Rows(prefix), None, None)  # type: ignore[arg-type]
        batches = trainer.loader(trainer.datasets.train, trainer.progress.consumed_samples)
        curve = []
        for _ in range(trainer.progress.iteration, last):
            result = trainer.train_step(batches)
            trainer.progress.scheduled_samples += 8
            curve.append((result.loss, result.grad_norm))
        return curve
    finally:
        close_mesh()


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_golden_losses_from_step_ten(tensor_parallel_size: int, tmp_path: Path):
    """Stopped by Megatron-LM at step 10, with its optimizer: steps 11 to 20 are Megatron-LM's."""
    with IndexedDatasetWriter(tmp_path / "rows", np.uint16) as writer:
        for row in np.load(GOLDEN / "micro_tokens.npy"):
            writer.add_document(row, [len(row)])
    load = ["--load", str(GOLDEN / "micro" / "fp32_iter10"), "--true-vocab-size", "128"]
    assert main(["convert", "from-megatron", *load, "--save", str(tmp_path / "ours")]) == 0
    flags = tiny_flags(
        tmp_path / "rows", load=tmp_path / "ours", tensor_model_parallel_size=tensor_parallel_size,
        **(MICRO | {"make_vocab_size_divisible_by": 128 // tensor_parallel_size}),
    )  # fmt: skip
    golden = json.loads((GOLDEN / "micro" / "losses.json").read_text())["fp32"][10:]
    for curve in run_ranks(tensor_parallel_size, go_on, flags, tmp_path / "rows", tensor_parallel_size):
        np.testing.assert_allclose([loss for loss, _ in curve], [step["loss"] for step in golden], rtol=2e-6)
        np.testing.assert_allclose([norm for _, norm in curve], [step["grad_norm"] for step in golden], rtol=5e-6)


def test_by_megatron_and_back_nothing_is_lost(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """A run of ours, stopped half-way, taken to Megatron-LM's form at tensor × pipeline 2 × 2 and back, at fp16: the
    same steps, bit for bit."""
    common = {"fp16": True, "initial_loss_scale": 2.0**17, "save_interval": 100, "train_iters": 8}
    straight = train_tiny(corpus, metrics=tmp_path / "a.jsonl", save=tmp_path / "a", **common)
    train_tiny(corpus, metrics=tmp_path / "b.jsonl", save=tmp_path / "b", exit_interval=4, **common)
    to = ["--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2"]
    assert main(["convert", "to-megatron", "--load", str(tmp_path / "b"), "--save", str(tmp_path / "m"), *to]) == 0
    assert main(["convert", "from-megatron", "--load", str(tmp_path / "m"), "--save", str(tmp_path / "c")]) == 0
    resumed = train_tiny(corpus, metrics=tmp_path / "c.jsonl", load=tmp_path / "c", **common)
    for name in ("lm_loss", "grad_norm", "loss_scale", "learning_rate"):
        assert [line[name] for line in resumed] == [line[name] for line in straight[4:]], name
    assert "another program read them" in capfd.readouterr().out


def test_a_hugging_face_model_is_trained_on(corpus: Path, tmp_path: Path):
    """At tensor parallel 2, in bf16: the first loss is the model's own."""
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128}
    source = random_source(vocab_size=211, layernorm_epsilon=1e-5, with_optimizer=False, **shape)
    write_hf(source, tmp_path / "hf", verify=False)
    convert_from_hf(tmp_path / "hf", tmp_path / "ours", verify=False)
    write_checkpoint(source, tmp_path / "same", verify=False)
    curves = [
        train_tiny(
            corpus,
            metrics=tmp_path / f"{name}.jsonl",
            load=tmp_path / name,
            finetune=True,
            world_size=2,
            tensor_model_parallel_size=2,
            train_iters=2,
        )
        for name in ("ours", "same")
    ]
    assert [line["lm_loss"] for line in curves[0]] == [line["lm_loss"] for line in curves[1]]
    assert [line["iteration"] for line in curves[0]] == [1, 2]


def test_what_is_not_there_is_said(tmp_path: Path, capfd: pytest.CaptureFixture, corpus: Path):
    """Megatron-LM's order of 2022 is refused unless it is asked for."""
    source = random_source(vocab_size=211, hidden_size=32, ffn_hidden_size=128, layernorm_epsilon=1e-5)
    write_megatron(source, tmp_path / "m", tp=1, pp=1)
    back = read_megatron(tmp_path / "m", VocabularyConfig(true_vocab_size=211))
    back.state.data["megatron_compat"] = 2022
    write_checkpoint(back, tmp_path / "ours")
    code = run_ranks(1, train.main, tiny_flags(corpus, load=tmp_path / "ours", override_opt_param_scheduler=True))
    assert code == [4]
    assert "Give --megatron-compat 2022 to read on" in capfd.readouterr().err
    assert torch.get_num_threads() == 1
