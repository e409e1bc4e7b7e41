"""Every pipeline is the run of a single process: losses and gradient norms, dropout on. (Each launch makes several
runs, since starting ranks is what takes the time.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.pipelining  # noqa: F401  (here once, not in each forked rank)

from tests.runs import train_each, write_corpus
from tests.test_layouts import assert_same_run

PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
INTERLEAVED = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
FEW = {"train_iters": 6, "lr_decay_iters": 20}
MASKED = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
EVALUATED = {"eval_interval": 5, "eval_iters": 2}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    write_corpus(prefix)
    return prefix


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """The single process's runs: four layers, four micro-batches of two samples."""
    batches = {f"{n} micro-batches": FEW | {"global_batch_size": 2 * n} for n in (1, 3, 5)}
    runs = {"plain": {}, "masked": MASKED, "evaluated": EVALUATED, **batches}
    return train_each(
        corpus, tmp_path_factory.mktemp("alone"), {name: {"num_layers": 4, **run} for name, run in runs.items()}
    )


def steps(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "split" not in line]


def test_two_ranks(corpus: Path, alone: dict[str, list[dict]], tmp_path: Path):
    runs = {
        "1f1b": PP2,
        "gpipe": PP2 | {"pipeline_schedule": "gpipe"},
        "interleaved": INTERLEAVED,
        "uneven": PP2 | {"decoder_first_pipeline_num_layers": 3},
        "masked": PP2 | MASKED,
        "evaluated": PP2 | EVALUATED,
        "interleaved, evaluated": INTERLEAVED | EVALUATED,
    }
    done = train_each(corpus, tmp_path, {k: {"num_layers": 4, **v} for k, v in runs.items()}, world_size=2)
    for name in ("1f1b", "gpipe", "interleaved", "uneven"):
        assert_same_run(done[name], alone["plain"])
    assert_same_run(done["masked"], alone["masked"])
    for name, plain in (("evaluated", "1f1b"), ("interleaved, evaluated", "interleaved")):
        # An evaluation between two steps leaves no trace in them.
        for key in ("lm_loss", "grad_norm"):
            assert [line[key] for line in steps(done[name])] == [line[key] for line in done[plain]]
        mine, theirs = ([line for line in lines if "split" in line] for lines in (done[name], alone["evaluated"]))
        assert [(line["split"], line["iteration"]) for line in mine] == [("valid", i) for i in (5, 10, 15, 20)]
        assert [line["lm_loss"] for line in mine] == pytest.approx([line["lm_loss"] for line in theirs], rel=1e-5)


def test_four_ranks(corpus: Path, alone: dict[str, list[dict]], tmp_path: Path):
    runs: dict[str, dict] = {
        "pp4": PP4,
        "pp2, tp2": PP2 | {"tensor_model_parallel_size": 2},
        "pp2, dp2": PP2,
        "interleaved, tp2": INTERLEAVED | {"tensor_model_parallel_size": 2},
        "masked": PP2 | MASKED | {"tensor_model_parallel_size": 2},
    }
    # Fewer than stages, not a multiple of them, more.
    batches = {f"{n} micro-batches": PP4 | FEW | {"global_batch_size": 2 * n} for n in (1, 3, 5)}
    done = train_each(corpus, tmp_path, {k: {"num_layers": 4, **v} for k, v in (runs | batches).items()}, world_size=4)
    for name in ("pp4", "pp2, tp2", "pp2, dp2", "interleaved, tp2"):
        assert_same_run(done[name], alone["plain"])
    assert_same_run(done["masked"], alone["masked"])
    for name in batches:
        for key in ("lm_loss", "grad_norm"):
            mine, theirs = ([line[key] for line in lines] for lines in (done[name], alone[name]))
            assert len(mine) == FEW["train_iters"] and mine == pytest.approx(theirs, rel=1e-5), (name, key)
