"""Save, resume, other layouts: nothing is lost and nothing is silently different."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.parallel import run_ranks
from tests.runs import read_metrics, tensors_of, tiny_flags, train_tiny
from trimegatron import feed, train


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every global tensor of a checkpoint."""
    return tensors_of(folder)


def assert_equal_checkpoints(one: Path, other: Path) -> None:
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name


def without_timing(lines: list[dict]) -> list[dict]:
    timing = {"tokens_per_second", "iteration_ms", "peak_memory_bytes"}
    return [{key: value for key, value in line.items() if key not in timing} for line in lines]


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {"tensor_model_parallel_size": 2}),
        (2, {}),
        (1, {"bf16": True, "train_iters": 8}),
        (1, {"fp16": True, "initial_loss_scale": 2.0**17, "loss_scale_window": 3, "train_iters": 8}),
    ],
    ids=["tp2", "dp2", "bf16", "fp16"],
)
def test_resumed_equals_uninterrupted(world_size: int, changes: dict, corpus: Path, tmp_path: Path):
    """Stopped half-way and resumed: the same bits in weights, moments, losses and metrics, each iteration once."""
    half = changes.get("train_iters", 20) // 2
    common = {"world_size": world_size, "save_interval": 100, "eval_iters": 1, "eval_interval": 4, **changes}
    straight = train_tiny(corpus, metrics=tmp_path / "a.jsonl", save=tmp_path / "a", **common)
    where = {"metrics": tmp_path / "b.jsonl", "save": tmp_path / "b", "load": tmp_path / "b"}
    train_tiny(corpus, exit_interval=half, **where, **common)
    resumed = train_tiny(corpus, **where, **common)
    assert without_timing(resumed) == without_timing(straight)
    last = f"iter_{changes.get('train_iters', 20):07d}"
    assert_equal_checkpoints(tmp_path / "a" / last, tmp_path / "b" / last)
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == str(changes.get("train_iters", 20))


def recorded_run(flags: list[str]) -> list[tuple[list[int], list[int]]]:
    """The numbers, and the tokens, of the samples of every micro-batch of a run."""
    seen = []
    take = feed.Feed.take

    def record(self, batches, num_micro_batches):
        for batch in take(self, batches, num_micro_batches):
            seen.append((batch.sample_numbers.tolist(), batch.tokens.flatten().tolist()))
            yield batch

    feed.Feed.take = record
    assert train.main(flags) == 0
    return seen


def test_a_later_epoch_goes_on_with_its_samples(corpus: Path, tmp_path: Path):
    """An epoch is 136 samples. Stopped after 144, in the middle of the second, and after 280, in the third: the same
    samples in the same micro-batches, and the same bits in the end."""
    small = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    common = small | {"train_iters": 40, "save_interval": 100}
    paths = {name: {"save": tmp_path / name, "metrics_file": tmp_path / name / "metrics.jsonl"} for name in "ab"}
    (straight,) = run_ranks(1, recorded_run, tiny_flags(corpus, **paths["a"], **common))
    resumed = []
    for stop in (18, 35, 40):
        changes = common | paths["b"] | {"load": tmp_path / "b", "exit_interval": stop}
        resumed += run_ranks(1, recorded_run, tiny_flags(corpus, **changes))[0]
    assert resumed == straight
    assert [number for numbers, _ in straight for number in numbers] == list(range(320))
    assert_equal_checkpoints(*(tmp_path / name / "iter_0000040" for name in "ab"))
    mine, theirs = (without_timing(read_metrics(paths[name]["metrics_file"])) for name in "ab")
    assert mine == theirs and [line["iteration"] for line in mine] == list(range(1, 41))


def test_metrics_beyond_the_checkpoint_are_dropped(corpus: Path, tmp_path: Path):
    """A run that was killed at 13 after saving at 10 writes 11 to 13 again, once."""
    where = {"metrics": tmp_path / "m.jsonl", "save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 10}
    train_tiny(corpus, exit_interval=10, **where)
    with (tmp_path / "m.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 11, "lm_loss": -1.0}) + "\n" + '{"iteration": 12, "lm_l')
    lines = train_tiny(corpus, **where)
    assert [line["iteration"] for line in lines] == list(range(1, 21))
    assert all(line["lm_loss"] > 0 for line in lines)


@pytest.mark.parametrize(("world_size", "tensor_parallel"), [(1, 1), (4, 2), (4, 4)])
def test_another_layout_goes_on(world_size: int, tensor_parallel: int, corpus: Path, tmp_path: Path):
    """Saved at tp=2, resumed elsewhere: the same tensors, and the losses of the layouts' equality."""
    common = {"save_interval": 100}
    straight = train_tiny(corpus, metrics=tmp_path / "a.jsonl", world_size=2, tensor_model_parallel_size=2, **common)
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "metrics": tmp_path / "b.jsonl"}
    train_tiny(corpus, world_size=2, tensor_model_parallel_size=2, exit_interval=10, **where, **common)
    resumed = train_tiny(corpus, world_size=world_size, tensor_model_parallel_size=tensor_parallel, **where, **common)
    for name in ("lm_loss", "grad_norm"):
        np.testing.assert_allclose([x[name] for x in resumed], [x[name] for x in straight], rtol=1e-5, err_msg=name)


def test_files_are_plain_safetensors_and_json(corpus: Path, tmp_path: Path):
    train_tiny(
        corpus, metrics=tmp_path / "m.jsonl", save=tmp_path / "c", save_interval=2, train_iters=2,
        world_size=2, tensor_model_parallel_size=2,
    )  # fmt: skip
    folder = tmp_path / "c" / "iter_0000002"
    kinds = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert kinds <= {".safetensors", ".json"}
    names = set().union(*(load_file(path) for path in folder.glob("shard-*.safetensors")))
    assert "model.layers.1.mlp.dense_h_to_4h.weight" in names
    state = json.loads((folder / "state.json").read_text())
    assert state["progress"]["consumed_samples"] == 16
    assert state["config"]["parallel"]["tensor_model_parallel_size"] == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"
    }
    whole = tensors(folder)["model.embedding.word_embeddings.weight"]
    assert list(whole.shape) == [211, 32]  # the true vocabulary, without padding


def load_and_fail(corpus: Path, capfd: pytest.CaptureFixture, *, code: int, **changes) -> str:
    assert run_ranks(1, train.main, tiny_flags(corpus, **changes)) == [code]
    return capfd.readouterr().err


def test_load_of_nothing(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    assert "does not exist" in load_and_fail(corpus, capfd, code=4, load=tmp_path / "typo")
    (tmp_path / "empty").mkdir()
    error = load_and_fail(corpus, capfd, code=4, load=tmp_path / "empty")
    assert "holds no complete checkpoint" in error and "Traceback" not in error
    assert "iter_0000007" in load_and_fail(corpus, capfd, code=4, load=tmp_path / "empty", ckpt_step=7)


def test_another_schedule_is_refused(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    train_tiny(corpus, metrics=tmp_path / "m.jsonl", save=tmp_path / "c", save_interval=2, train_iters=2)
    error = load_and_fail(corpus, capfd, code=4, load=tmp_path / "c", lr=1.0)
    assert "lr is 0.01 there and 1.0 here" in error and "--override-opt_param-scheduler" in error


def test_finetune_starts_anew_from_the_weights(corpus: Path, tmp_path: Path):
    train_tiny(corpus, metrics=tmp_path / "m.jsonl", save=tmp_path / "c", save_interval=20)
    lines = train_tiny(corpus, metrics=tmp_path / "n.jsonl", load=tmp_path / "c", finetune=True, lr=1e-3, train_iters=3)
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert lines[0]["lm_loss"] < 4.8  # an untrained model starts at ln 211 = 5.35


def test_checkpoint_without_optimizer(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    where = {"save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 2}
    train_tiny(corpus, metrics=tmp_path / "m.jsonl", train_iters=2, no_save_optim=True, **where)
    assert "holds no optimizer state" in load_and_fail(corpus, capfd, code=4, train_iters=4, **where)
    lines = train_tiny(corpus, metrics=tmp_path / "m.jsonl", train_iters=4, no_load_optim=True, **where)
    assert [line["iteration"] for line in lines] == [1, 2, 3, 4]
