"""The losses of the real Megatron-LM (September 2022, fp32 on a CPU) from its own initial weights."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.parallel import run_ranks
from tests.runs import tiny_flags
from trimegatron import train
from trimegatron.config import parse_train_args
from trimegatron.data.build import Datasets
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.mesh import close_mesh, init_mesh, launched_world_size, select_device
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.preflight import with_vocab_size
from trimegatron.tokenizer import build_tokenizer

GOLDEN = Path(__file__).parent / "golden" / "checkpoints"


class Rows:
    """The sequences of a dataset as samples, in their own order: what the golden run was fed."""

    name = "train"

    def __init__(self, prefix: Path):
        self.data = IndexedDataset(prefix)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.data.get(index).astype(np.int64)


def write_rows(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for row in np.load(GOLDEN / "tokens.npy"):
            writer.add_document(row, [len(row)])


def load_golden_weights(optimizer: FlatAdamW) -> None:
    """Copy what this rank holds of the golden parameters; the names differ by a prefix only."""
    golden = load_file(GOLDEN / "h64_init.safetensors")
    for piece in optimizer.buffer.slices:
        prefix = "language_model." if piece.name.startswith("embedding.") else "language_model.encoder."
        whole = golden[prefix + piece.name]
        for dim, (offset, size) in enumerate(zip(piece.spec.offsets, piece.spec.extent, strict=True)):
            whole = whole.narrow(dim, offset, size)
        piece.spec.valid(piece.view(optimizer.master)).copy_(whole)
    optimizer.refresh_parameters()


def replay(prefix: Path, tensor_parallel_size: int, changes: dict) -> dict[str, list[float]]:
    """What came of the golden run's 20 steps, on one rank of some layout."""
    flags = tiny_flags(
        prefix,
        tensor_model_parallel_size=tensor_parallel_size,
        **{
            "hidden_size": 64,
            "seq_length": 64,
            "max_position_embeddings": 64,
            "make_vocab_size_divisible_by": 128,
            # With the end token 512, the golden run's padded vocabulary, all of which takes probability there.
            "vocab_size": 511,
            "split": "100,0,0",
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "train_iters": 20,
            "lr_warmup_iters": 4,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "log_interval": 100,
        }
        | changes,
    )
    device = select_device("cpu")
    config = parse_train_args(flags, world_size=launched_world_size())
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.model.vocab_size)
    config = with_vocab_size(config, tokenizer)
    pipeline_parallel_size = config.parallel.pipeline_model_parallel_size
    mesh = init_mesh(device, tensor_parallel_size=tensor_parallel_size, pipeline_parallel_size=pipeline_parallel_size)
    try:
        trainer = train.build_trainer(config, mesh, tokenizer, None, lambda line: None)
        trainer.datasets = Datasets(Rows(prefix), None, None)  # type: ignore[arg-type]
        load_golden_weights(trainer.optimizer)
        curve: dict[str, list[float]] = {"loss": [], "grad_norm": [], "loss_scale": [], "skipped": []}
        batches = trainer.loader(trainer.datasets.train, 0)
        for _ in range(20):
            result = trainer.train_step(batches)
            trainer.progress.scheduled_samples += 0 if result.is_skipped else 8
            curve["loss"].append(result.loss)
            curve["grad_norm"].append(result.grad_norm)
            curve["loss_scale"].append(trainer.scaler.scale)  # after the step, as Megatron logs it
            curve["skipped"].append(int(result.is_skipped))
        return curve
    finally:
        close_mesh()


@pytest.mark.parametrize(
    ("world_size", "tensor_parallel_size", "changes"),
    [
        (1, 1, {}),
        (1, 1, {"attention_backend": "softmax"}),
        (1, 1, {"vocab_size": 499, "no_mask_padded_vocab": True}),  # 500 padded to 512
        (2, 2, {}),
        (2, 1, {}),
        (2, 1, {"pipeline_model_parallel_size": 2}),
        (4, 2, {"pipeline_model_parallel_size": 2, "sequence_parallel": True, "recompute_activations": True}),
    ],
)
def test_twenty_losses(tmp_path: Path, world_size: int, tensor_parallel_size: int, changes: dict):
    write_rows(tmp_path / "rows")
    golden = json.loads((GOLDEN / "h64_losses.json").read_text())
    for curve in run_ranks(world_size, replay, tmp_path / "rows", tensor_parallel_size, changes):
        np.testing.assert_allclose(curve["loss"], golden["loss"], rtol=2e-6)
        np.testing.assert_allclose(curve["grad_norm"], golden["grad_norm"], rtol=5e-6)


@pytest.mark.parametrize(
    ("precision", "changes", "loss_tolerance"),
    [("fp16", {"fp16": True, "loss_scale": 65536}, 2e-4), ("bf16", {"bf16": True}, 2e-3)],
)
def test_half_precision(tmp_path: Path, precision: str, changes: dict, loss_tolerance: float):
    """Megatron's own half-precision runs differ from its fp32 run by as much as 2.5e-4 and 2.4e-3."""
    write_rows(tmp_path / "rows")
    golden = json.loads((GOLDEN / "h64_losses.json").read_text())[precision]
    (curve,) = run_ranks(1, replay, tmp_path / "rows", 1, changes)
    np.testing.assert_allclose(curve["loss"], golden["loss"], rtol=loss_tolerance)
    np.testing.assert_allclose(curve["grad_norm"], golden["grad_norm"], rtol=0.05)


@pytest.mark.parametrize(("world_size", "tensor_parallel_size"), [(1, 1), (2, 2), (2, 1)])
def test_dynamic_loss_scale(tmp_path: Path, world_size: int, tensor_parallel_size: int):
    """From 2^32 the first 14 steps overflow; which later ones do, and every scale, is as in Megatron's run, on every
    rank: also where a part of the gradient overflows on one of them only."""
    write_rows(tmp_path / "rows")
    golden = json.loads((GOLDEN / "h64_losses.json").read_text())["fp16_dynamic"]
    curves = run_ranks(world_size, replay, tmp_path / "rows", tensor_parallel_size, {"fp16": True})
    for curve in curves:
        assert curve["skipped"] == golden["skipped"]
        assert curve["loss_scale"] == golden["loss_scale"]
        assert curve["loss"] == curves[0]["loss"] and all(map(math.isfinite, curve["loss"]))


def test_masking_the_padding_changes_the_loss(tmp_path: Path):
    """The one deliberate difference: padding takes no probability, which at the start is that of 12 of 512 equal
    words.
    """
    write_rows(tmp_path / "rows")
    golden = json.loads((GOLDEN / "h64_losses.json").read_text())
    (curve,) = run_ranks(1, replay, tmp_path / "rows", 1, {"vocab_size": 499})
    assert curve["loss"][0] == pytest.approx(golden["loss"][0] - math.log(512 / 500), abs=5e-4)
