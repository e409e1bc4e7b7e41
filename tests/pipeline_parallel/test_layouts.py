"""Every pipeline is the run of a single process: losses and gradient norms, dropout on. (Each launch makes several
runs, since starting ranks is what takes the time.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.pipelining  # noqa: F401  (here once, not in each forked rank)

from tests.runs import train_each
from tests.test_layouts import assert_same_run

PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
INTERLEAVED = PP2 | {"num_layers_per_virtual_pipeline_stage": 1}
FEW = {"train_iters": 4, "lr_decay_iters": 20}
MASKED = {"eod_mask_loss": True, "reset_position_ids": True, "reset_attention_mask": True}
EVALUATED = {"eval_interval": 5, "eval_iters": 2}
NUMBERS = (1, 3, 5)
"""Of micro-batches, on four ranks: fewer than stages, and no multiple of them."""


def four_layers(runs: dict[str, dict]) -> dict[str, dict]:
    return {name: {"num_layers": 4, **run} for name, run in runs.items()}


def numbers_of_micro_batches(**changes: int) -> dict[str, dict]:
    return {f"{n} micro-batches": FEW | {"global_batch_size": 2 * n} | changes for n in NUMBERS}


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """The single process's runs: four micro-batches of two samples a step, or other numbers of them."""
    runs = {"evaluated": EVALUATED, "masked": MASKED} | numbers_of_micro_batches()
    return train_each(corpus, tmp_path_factory.mktemp("alone"), four_layers(runs))


def steps(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "split" not in line]


def evaluations(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "split" in line]


def test_two_ranks(corpus: Path, alone: dict[str, list[dict]], tmp_path: Path):
    runs = {
        "1f1b": PP2,
        "gpipe": PP2 | {"pipeline_schedule": "gpipe"},
        "uneven": PP2 | {"decoder_first_pipeline_num_layers": 3},
        "masked": PP2 | MASKED,
        "evaluated": PP2 | EVALUATED,
        "interleaved, evaluated": INTERLEAVED | EVALUATED,
    }
    done = train_each(corpus, tmp_path, four_layers(runs), world_size=2)
    for name, lines in done.items():
        assert_same_run(steps(lines), steps(alone["masked" if name == "masked" else "evaluated"]))
    for name in ("evaluated", "interleaved, evaluated"):
        mine, theirs = evaluations(done[name]), evaluations(alone["evaluated"])
        assert [(line["split"], line["iteration"]) for line in mine] == [("valid", i) for i in (5, 10, 15, 20)]
        assert [line["lm_loss"] for line in mine] == pytest.approx([line["lm_loss"] for line in theirs], rel=1e-5)
    # An evaluation between two steps leaves no trace in them.
    for key in ("lm_loss", "grad_norm"):
        assert [line[key] for line in steps(done["evaluated"])] == [line[key] for line in done["1f1b"]]


def test_four_ranks(corpus: Path, alone: dict[str, list[dict]], tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    runs = {
        "pp4": PP4,
        "pp2, tp2": PP2 | {"tensor_model_parallel_size": 2},
        "pp2, dp2": PP2,
        "interleaved, tp2": INTERLEAVED | {"tensor_model_parallel_size": 2},
    }
    batches = numbers_of_micro_batches(**PP4)
    done = train_each(corpus, tmp_path, four_layers(runs | batches), world_size=4)
    for name in runs:
        assert_same_run(done[name], steps(alone["evaluated"]))
    for name in batches:
        for key in ("lm_loss", "grad_norm"):
            mine, theirs = ([line[key] for line in lines] for lines in (done[name], alone[name]))
            assert len(mine) == FEW["train_iters"] and mine == pytest.approx(theirs, rel=1e-5), (name, key)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("pipeline schedule")]
    assert said == [
        "pipeline schedule 1f1b; layers of the ranks: 0 | 1 | 2 | 3",
        "pipeline schedule 1f1b; layers of the ranks: 0–1 | 2–3",
        "pipeline schedule 1f1b; layers of the ranks: 0–1 | 2–3",
        "pipeline schedule interleaved; layers of the ranks: 0 and 2 | 1 and 3",
        *["pipeline schedule gpipe (1f1b needs a micro-batch for each of 4 stages); layers of the ranks: 0 | 1 | 2 | 3"]
        * 2,
        "pipeline schedule 1f1b; layers of the ranks: 0 | 1 | 2 | 3",
    ]
