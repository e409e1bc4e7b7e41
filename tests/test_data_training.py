"""Training on every kind of data: layouts, blends, small sets, nodes with their own disks, resuming."""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel import run_ranks
from tests.runs import tiny_flags, train_tiny, write_corpus
from trimegatron import train
from trimegatron.data.indexed_dataset import IndexedDataset
from trimegatron.data.legacy_format import LegacyHeader

FEW = {"train_iters": 5, "lr_decay_iters": 5, "lr_warmup_iters": 1}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    for k in range(3):
        write_corpus(folder / f"text{k}", seed=k)
    return [folder / f"text{k}" for k in range(3)]


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["lm_loss"] for line in lines]


def write_lazy(source: Path, prefix: Path) -> None:
    """The same tokens with Megatron's older index, int32 as it wrote them."""
    data = IndexedDataset(source)
    ends = np.concatenate(([0], data.sizes.cumsum(dtype=np.int64)))
    header = LegacyHeader(np.dtype("<i4"), len(data), len(data.document_indices))
    arrays = (np.arange(len(data) + 1), ends, data.sizes.astype("<i8"), data.document_indices)
    Path(f"{prefix}.idx").write_bytes(header.pack() + b"".join(array.tobytes() for array in arrays))
    Path(f"{prefix}.bin").write_bytes(np.concatenate([data.get(i) for i in range(len(data))]).astype("<i4").tobytes())


def test_every_layout_and_way_of_reading_trains_alike(corpora: list[Path], tmp_path: Path) -> None:
    write_lazy(corpora[0], tmp_path / "lazy")
    expected = losses(train_tiny(corpora[0], metrics=tmp_path / "m", **FEW))
    for k, (prefix, impl) in enumerate(itertools.product((tmp_path / "lazy", corpora[0]), ("infer", "lazy", "cached"))):
        changes = {**FEW, "data_impl": impl, "num_workers": 1 if impl == "lazy" else 0}
        assert losses(train_tiny(prefix, metrics=tmp_path / f"m{k}", **changes)) == expected


def train_blend(words: list[str], *, world_size: int = 1, **changes: Any) -> list[int]:
    flags = tiny_flags(Path("-"), **{**changes, "data_path": None})
    return run_ranks(world_size, train.main, [*flags, *words])


def test_a_blend_trains_resumes_and_records_what_it_read(
    corpora: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two halves at two layouts equal the whole, and the checkpoint counts the samples of each source."""
    a, b, c = map(str, corpora)
    words = ["--data-path", "2", a, "1", b, "0", c]
    where = {"save": tmp_path / "a", "save_interval": 100, "metrics_file": tmp_path / "a.jsonl", "eval_iters": 1}
    assert train_blend(words, **where) == [0]
    said = capfd.readouterr().out
    assert "train: a blend of 3 sets, 160 samples of 16 tokens needed" in said
    assert f"  0.666667 from {a}: 107 samples" in said
    half = {**where, "save": tmp_path / "b", "load": tmp_path / "b", "metrics_file": tmp_path / "b.jsonl"}
    assert train_blend(words, exit_interval=10, **half) == [0]
    state = json.loads((tmp_path / "b" / "iter_0000010" / "state.json").read_text())["data"]
    assert state["consumed"] == {a: 53, b: 27}
    assert train_blend(words, world_size=2, **half) == [0, 0]
    whole, resumed = (
        [json.loads(line)["lm_loss"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()] for name in "ab"
    )
    np.testing.assert_allclose(resumed, whole, rtol=1e-4)
    state = json.loads((tmp_path / "b" / "iter_0000020" / "state.json").read_text())["data"]
    assert (state["first_sample"], state["last_sample"], state["before"]) == (0, 160, [])
    assert state["consumed"] == {a: 107, b: 53}
    assert "order of the training samples" not in capfd.readouterr().out
    # The same checkpoint with other data, and by the rules of the other year.
    longer = {"train_iters": 24, "lr_decay_iters": 20, "override_opt_param_scheduler": True}
    assert train_blend(["--data-path", "1", a, "1", c], **half, **longer) == [0]
    assert "the order of the training samples from 160 on is not the one" in capfd.readouterr().out
    state = json.loads((tmp_path / "b" / "iter_0000024" / "state.json").read_text())["data"]
    assert [segment["consumed"] for segment in state["before"]] == [{a: 107, b: 53}]
    assert sum(state["consumed"].values()) == 32
    assert train_blend([*words, "--megatron-compat", "2022"], **half, **longer) == [4]
    assert "follows --megatron-compat 2026, this command's 2022" in capfd.readouterr().err


def test_cyclic_says_when_the_layout_changes_the_order(
    corpora: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"dataloader_type": "cyclic", "save": tmp_path / "c", "load": tmp_path / "c", "save_interval": 100}
    train_tiny(corpora[0], metrics=tmp_path / "m", exit_interval=10, **changes)
    lines = train_tiny(corpora[0], metrics=tmp_path / "m", exit_interval=15, **changes)
    assert [line["iteration"] for line in lines] == list(range(1, 16))
    assert "order of the training samples" not in capfd.readouterr().out
    train_tiny(corpora[0], world_size=2, metrics=tmp_path / "m", **changes)
    assert "data_parallel_size was 1 and is 2" in capfd.readouterr().out


def test_a_validation_set_smaller_than_a_batch(corpora: list[Path], tmp_path: Path) -> None:
    """Its few samples are repeated; no token of it is trained on, none of training is evaluated."""
    lines = train_tiny(
        corpora[0], metrics=tmp_path / "m", split="59,1,0", eval_iters=2, eval_interval=2, **FEW
    )  # one document of validation: fewer than 4 samples, batches of 8
    evaluations = [line for line in lines if line.get("split") == "valid"]
    assert [line["iteration"] for line in evaluations] == [2, 4, 5]
    assert all(np.isfinite(line["lm_loss"]) for line in evaluations)


def test_evaluation_without_a_validation_set_is_said(
    corpora: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = train_tiny(corpora[0], metrics=tmp_path / "m", split="100,0,0", eval_iters=2, eval_interval=2, **FEW)
    assert len(lines) == 5
    assert "no validation: --split 100,0,0 gives it no documents" in capfd.readouterr().out


def _on_node(flags: list[list[str]]) -> tuple[int, float]:
    """``train`` with this rank's own flags."""
    started = time.monotonic()
    return train.main(flags[int(os.environ["RANK"])]), time.monotonic() - started


def test_nodes_with_their_own_disks(corpora: list[Path], tmp_path: Path) -> None:
    metrics = {"metrics_file": tmp_path / "m"}
    flags = [tiny_flags(corpora[0], data_cache_path=tmp_path / name, **metrics, **FEW) for name in ("one", "two")]
    assert [code for code, _ in run_ranks(2, _on_node, flags)] == [0, 0]
    files = [sorted(path.name for path in (tmp_path / name).glob("*.npy")) for name in ("one", "two")]
    assert files[0] == files[1] != []


def test_a_folder_that_one_node_cannot_write_stops_all_soon(
    corpora: list[Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    metrics = {"metrics_file": tmp_path / "m"}
    places = (tmp_path / "one", tmp_path / "file" / "cache")
    flags = [tiny_flags(corpora[0], data_cache_path=place, **metrics, **FEW) for place in places]
    for code, seconds in run_ranks(2, _on_node, flags):
        assert code == 3
        assert seconds < 15
    said = capfd.readouterr().err
    assert said.count("cannot keep the index maps there") == 1
    assert "--data-cache-path" in said
