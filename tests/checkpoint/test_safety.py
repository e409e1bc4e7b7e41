"""What must never happen: two runs mixed, the only checkpoint lost, garbage loaded, a file of the user's destroyed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.parallel import run_ranks
from tests.runs import tiny_flags, train_tiny
from trimegatron import train
from trimegatron.checkpoint.directory import find_checkpoint
from trimegatron.cli import main
from trimegatron.data.indexed_writer import IndexedDatasetWriter


def fails(corpus: Path, capfd: pytest.CaptureFixture, code: int, *, world_size: int = 1, **changes) -> str:
    """Standard error of a run that must end with ``code`` on every rank, without a traceback and with one message."""
    capfd.readouterr()
    assert run_ranks(world_size, train.main, tiny_flags(corpus, **changes)) == [code] * world_size
    error = capfd.readouterr().err
    assert "Traceback" not in error and error.count("trimegatron train: error") == 1
    return error


def test_a_finished_run_is_left_as_it_is(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    """Run again, it neither saves, nor evaluates, nor writes a line."""
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 100, "metrics": tmp_path / "m.jsonl"}
    train_tiny(corpus, train_iters=4, eval_iters=1, eval_interval=2, **where)
    folder = tmp_path / "c" / "iter_0000004"
    before = (tmp_path / "m.jsonl").read_bytes(), folder.stat().st_ino
    train_tiny(corpus, train_iters=4, eval_iters=1, eval_interval=2, **where)
    assert "nothing is left to train" in capfd.readouterr().out
    assert before == ((tmp_path / "m.jsonl").read_bytes(), folder.stat().st_ino)
    evaluations = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines() if "split" in line]
    assert [line["iteration"] for line in evaluations if line["split"] == "valid"] == [2, 4]


def test_a_kill_between_the_two_renames_loses_nothing(corpus: Path, tmp_path: Path):
    where = {"save": tmp_path / "c", "save_interval": 2, "metrics": tmp_path / "m.jsonl"}
    train_tiny(corpus, train_iters=2, **where)
    folder = tmp_path / "c" / "iter_0000002"
    aside = folder.rename(tmp_path / "c" / ".iter_0000002.replaced")
    assert find_checkpoint(tmp_path / "c") == aside
    lines = train_tiny(corpus, train_iters=4, load=tmp_path / "c", **where)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]


def test_the_tracker_leads(corpus: Path, tmp_path: Path):
    """Going back with --ckpt-step and on from there makes that branch the run, whatever lies beyond."""
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 2, "metrics": tmp_path / "m.jsonl"}
    train_tiny(corpus, train_iters=8, **where)
    train_tiny(corpus, train_iters=8, ckpt_step=2, exit_interval=4, **where)
    assert find_checkpoint(tmp_path / "c") == tmp_path / "c" / "iter_0000004"
    (tmp_path / "c" / "latest_checkpointed_iteration.txt").write_text("")
    assert find_checkpoint(tmp_path / "c") == tmp_path / "c" / "iter_0000008"


def test_save_over_another_run_is_refused(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    where = {"save": tmp_path / "c", "save_interval": 2, "train_iters": 2}
    train_tiny(corpus, metrics=tmp_path / "m.jsonl", **where)
    assert f"Add --load {tmp_path / 'c'}" in fails(corpus, capfd, 2, seed=77, **where)


def test_a_checkpoint_folder_given_itself_is_checked(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    train_tiny(
        corpus, metrics=tmp_path / "m.jsonl", save=tmp_path / "c", save_interval=2, train_iters=2,
        world_size=4, tensor_model_parallel_size=4,
    )  # fmt: skip
    folder = tmp_path / "c" / "iter_0000002"
    (folder / "shard-00001.safetensors").unlink()
    assert "shard-00001.safetensors is missing" in fails(corpus, capfd, 4, load=folder)
    assert main(["generate", "--load", str(folder), "--prompt", "1"]) == 4
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["shard-00001.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "do not cover" in fails(corpus, capfd, 4, load=folder)


def test_ids_of_another_tokenizer(tmp_path: Path, capfd: pytest.CaptureFixture):
    with IndexedDatasetWriter(tmp_path / "text", np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_document(np.arange(200, 240), [40])
    for size in (1, 2):
        error = fails(tmp_path / "text", capfd, 3, world_size=size, tensor_model_parallel_size=size)
        assert "but the vocabulary has 211 words" in error


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_failure_ends_at_once_also_with_data_workers(world_size: int, tmp_path: Path, capfd: pytest.CaptureFixture):
    with IndexedDatasetWriter(tmp_path / "text", np.dtype(np.uint16)) as writer:
        for _ in range(40):
            writer.add_document(np.arange(200, 240), [40])
    assert "vocabulary" in fails(tmp_path / "text", capfd, 3, world_size=world_size, num_workers=2)


def test_outputs_that_cannot_be_written(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    (tmp_path / "file").write_text("my notes\nof years\n")
    assert "--save" in fails(corpus, capfd, 2, save=tmp_path / "file", save_interval=2)
    assert "--metrics-file" in fails(corpus, capfd, 2, metrics_file=tmp_path / "file" / "m.jsonl")
    assert "--tensorboard-dir" in fails(corpus, capfd, 2, tensorboard_dir=tmp_path / "file")
    assert "my notes" in fails(corpus, capfd, 2, metrics_file=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "my notes\nof years\n"


def test_a_run_by_samples_ends_by_samples(corpus: Path, tmp_path: Path):
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 100, "metrics": tmp_path / "m.jsonl"}
    by_samples = {"train_iters": None, "train_samples": 80, "lr_decay_iters": None, "lr_warmup_iters": None}
    train_tiny(corpus, exit_interval=5, **where, **by_samples)
    lines = train_tiny(corpus, global_batch_size=4, **where, **by_samples)
    assert lines[-1]["consumed_samples"] == 80


def test_log_intervals_go_on_over_a_resume(corpus: Path, tmp_path: Path):
    straight = train_tiny(corpus, metrics=tmp_path / "a.jsonl", log_interval=10)
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 100, "metrics": tmp_path / "b.jsonl"}
    train_tiny(corpus, log_interval=10, exit_interval=5, **where)
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    resumed = train_tiny(corpus, log_interval=10, **where)
    assert [line["lm_loss"] for line in resumed] == [line["lm_loss"] for line in straight]
