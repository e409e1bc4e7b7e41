"""Any layout loads what any other saved, every element the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runs import read_metrics, train_each, write_corpus
from trimegatron.checkpoint.compare import tensor_differences
from trimegatron.checkpoint.stored import stored_pieces

SHARDED = {"use_distributed_optimizer": True, "overlap_param_gather": True}
COMMON = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "ddp_bucket_size": 1500,
    "save_interval": 2,
    "train_iters": 3,
}
"""A checkpoint after 2 steps of 3. The vocabulary is 211, which nothing divides."""


def layout(data: int, tensor: int, pipeline: int, **changes: Any) -> tuple[int, dict[str, Any]]:
    """Number of ranks, and the flags."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    return data * tensor * pipeline, sizes | changes


LAYOUTS = {
    "dp2 tp2 pp2 sharded": layout(2, 2, 2, **SHARDED),
    "alone": layout(1, 1, 1),
    "dp2": layout(2, 1, 1),
    "tp2": layout(1, 2, 1),
    "pp2": layout(1, 1, 2),
    "dp2 tp2": layout(2, 2, 1),
    "tp2 pp2": layout(1, 2, 2),
}
FORMS = {
    "dp2 tp2 sharded": layout(2, 2, 1, **SHARDED),
    "dp4 sharded": layout(4, 1, 1, **SHARDED),
    "tp2 in sequence": layout(1, 2, 1, sequence_parallel=True),
    "pp2 interleaved": layout(1, 1, 2, num_layers_per_virtual_pipeline_stage=1),
}
"""Other forms of the same cuts."""


def load_all(
    corpus: Path, folder: Path, name: str, sources: list[str], common: dict[str, Any], layouts: dict[str, Any]
) -> None:
    """Layout ``name`` loads the checkpoint of each of ``sources`` and saves it at once, and then goes on one step:
    not an element has changed, and the loss and the norm are those of the source's own next step."""
    world_size, changes = layouts[name]
    runs: dict[str, dict[str, Any]] = {}
    for source in sources:
        load = common | changes | {"load": folder / source, "ckpt_step": 2}
        runs[f"{source} saved by {name}"] = load | {"save": folder / f"{source} saved by {name}", "train_iters": 2}
        runs[f"{source} to {name}"] = load | {"save_interval": None}
    lines = train_each(corpus, folder, runs, world_size=world_size)
    for source in sources:
        again = folder / f"{source} saved by {name}" / "iter_0000002"
        assert list(tensor_differences(folder / source / "iter_0000002", again)) == []
        (mine,), (theirs,) = (
            [line for line in run if line["iteration"] == 3]
            for run in (lines[f"{source} to {name}"], read_metrics(folder / f"{source}.jsonl"))
        )
        for key in ("lm_loss", "grad_norm"):
            tolerance = 2e-3 if common.get("bf16") else 1e-5
            np.testing.assert_allclose(mine[key], theirs[key], rtol=tolerance, err_msg=f"{source} to {name}: {key}")


def save_by(corpus: Path, folder: Path, name: str, common: dict[str, Any], layouts: dict[str, Any]) -> None:
    """The three steps of one layout."""
    world_size, changes = layouts[name]
    train_each(corpus, folder, {name: common | changes | {"save": folder / name}}, world_size=world_size)


def test_every_layout_loads_the_most_cut(tmp_path: Path):
    """What eight ranks saved, each a piece of most tensors, is loaded by the other six."""
    first, *others = LAYOUTS
    write_corpus(tmp_path / "text")
    save_by(tmp_path / "text", tmp_path, first, COMMON, LAYOUTS)
    for name in others:
        load_all(tmp_path / "text", tmp_path, name, [first], COMMON, LAYOUTS)


def test_half_precision(tmp_path: Path):
    """The same with fp32 masters beside bf16 weights, and back to the sharded form."""
    common = COMMON | {"bf16": True}
    write_corpus(tmp_path / "text")
    for one, other in (("dp2 tp2 sharded", "alone"), ("alone", "dp4 sharded")):
        save_by(tmp_path / "text", tmp_path, one, common, LAYOUTS | FORMS)
        assert "optimizer.master.final_layernorm.weight" in stored_pieces(tmp_path / one / "iter_0000002")
        load_all(tmp_path / "text", tmp_path, other, [one], common, LAYOUTS | FORMS)


@pytest.mark.long
@pytest.mark.parametrize("bf16", [None, True], ids=["fp32", "bf16"])
def test_all_pairs(bf16: bool | None, tmp_path: Path):
    """Each layout, in all its forms, loads what each has saved."""
    common, layouts = COMMON | {"bf16": bf16, "num_layers": 4}, LAYOUTS | FORMS
    write_corpus(tmp_path / "text")
    for name in layouts:
        save_by(tmp_path / "text", tmp_path, name, common, layouts)
    for name in layouts:
        load_all(tmp_path / "text", tmp_path, name, list(layouts), common, layouts)


def test_who_writes_what(tmp_path: Path):
    """Every element once: what ranks hold alike from one of them, a sharded optimizer's from each its own rows."""
    corpus = tmp_path / "text"
    write_corpus(corpus)
    runs = {
        name: COMMON | {"train_iters": 2, "save": tmp_path / name, "use_distributed_optimizer": sharded}
        for name, sharded in (("plain", None), ("sharded", True))
    }
    train_each(corpus, tmp_path, runs, world_size=2)
    files = {name: {f.name for f in (tmp_path / name / "iter_0000002").glob("shard-*")} for name in runs}
    assert files == {
        "plain": {"shard-00000.safetensors"},
        "sharded": {"shard-00000.safetensors", "shard-00001.safetensors"},
    }
    pieces = stored_pieces(tmp_path / "sharded" / "iter_0000002")
    for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        table = sorted(pieces[f"{prefix}.embedding.word_embeddings.weight"], key=lambda piece: piece.offsets)
        # The bucket is cut in the middle, at a multiple of 128 elements: after row 120 of 211.
        assert [(piece.offsets, piece.shape) for piece in table] == [((0, 0), (120, 16)), ((120, 0), (91, 16))]
