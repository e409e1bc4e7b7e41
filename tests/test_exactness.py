"""The exactness matrix: every layout, schedule, sharding and recomputation is the same run.

20 steps with dropout 0.1, in fp32, on a vocabulary that nothing divides; losses and gradient norms within 1e-5 of one
process's. ``make test`` runs a core of it, ``make test-long`` a set in which every two choices meet.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.pairwise import Combination, covering_set
from tests.runs import train_tiny

NUM_LAYERS, GLOBAL_BATCH = 4, 8

CHOICES: dict[str, Any] = {
    "layout": [  # data, tensor, pipeline
        (1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4),
        (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 2, 4), (4, 1, 2), (1, 4, 2),
    ],
    "schedule": ["gpipe", "1f1b", "interleaved"],
    "sequence_parallel": [False, True],
    "distributed_optimizer": [False, True],
    "recompute": [None, "selective", "uniform", "block"],
    "micro_batch_size": [1, 2, 4],
    "masked": [False, True],
}  # fmt: skip


def is_valid(c: Combination) -> bool:
    """What the configuration accepts; what would change nothing is left out."""
    dp, tp, pp = c["layout"]
    num_micro_batches, rest = divmod(GLOBAL_BATCH, c["micro_batch_size"] * dp)
    if rest or (c["sequence_parallel"] and tp == 1) or (c["distributed_optimizer"] and dp == 1):
        return False
    if c["schedule"] == "interleaved":
        return pp > 1 and NUM_LAYERS % (2 * pp) == 0 and num_micro_batches % pp == 0
    return pp > 1 or c["schedule"] == "gpipe"


def combination(layout: tuple[int, int, int], schedule: str, **changes: Any) -> Combination:
    plain = {"sequence_parallel": False, "distributed_optimizer": False, "recompute": None}
    return {"layout": layout, "schedule": schedule, **plain, "micro_batch_size": 1, "masked": False, **changes}


CORE = [
    combination((2, 2, 1), "gpipe", sequence_parallel=True, distributed_optimizer=True, recompute="uniform"),
    combination((1, 2, 2), "1f1b", sequence_parallel=True, recompute="selective", micro_batch_size=2),
    combination((2, 1, 2), "interleaved", distributed_optimizer=True, recompute="block", masked=True),
    combination((1, 1, 4), "1f1b", micro_batch_size=4),  # fewer micro-batches than stages
    combination((2, 2, 2), "1f1b", sequence_parallel=True, distributed_optimizer=True, masked=True),
]
LONG = [c for c in covering_set(CHOICES, is_valid) if c not in CORE]


def flags(c: Combination) -> dict[str, Any]:
    """The training flags of a combination."""
    dp, tp, pp = c["layout"]
    is_interleaved = c["schedule"] == "interleaved"
    recompute: dict[str, Any] = {}
    if c["recompute"] == "selective":
        recompute = {"recompute_activations": True}
    elif c["recompute"] is not None:
        recompute = {"recompute_granularity": "full", "recompute_method": c["recompute"], "recompute_num_layers": 1}
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_schedule": c["schedule"] if pp > 1 else None,
        "num_layers_per_virtual_pipeline_stage": NUM_LAYERS // (2 * pp) if is_interleaved else None,
        "sequence_parallel": c["sequence_parallel"] or None,
        "use_distributed_optimizer": c["distributed_optimizer"] or None,
        "overlap_grad_reduce": dp > 1 or None,
        "overlap_param_gather": c["distributed_optimizer"] or None,
        "ddp_bucket_size": 8000,  # several buckets
        "micro_batch_size": c["micro_batch_size"],
        "eod_mask_loss": c["masked"] or None,
        **recompute,
    }


def name(c: Combination) -> str:
    parts = ["×".join(map(str, c["layout"])), c["schedule"], f"mbs{c['micro_batch_size']}"]
    parts += [key for key in ("sequence_parallel", "distributed_optimizer", "masked") if c[key]]
    return " ".join([*parts, *([c["recompute"]] if c["recompute"] else [])])


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[dict]]:
    """One process's run, without and with masked tokens (the end token is 210, a word of the corpus)."""
    return {
        masked: train_tiny(
            corpus,
            metrics=tmp_path_factory.mktemp("alone") / "metrics.jsonl",
            num_layers=NUM_LAYERS,
            micro_batch_size=GLOBAL_BATCH,
            eod_mask_loss=masked or None,
        )
        for masked in (False, True)
    }


def check(c: Combination, corpus: Path, alone: dict[bool, list[dict]], metrics: Path) -> None:
    lines = train_tiny(corpus, world_size=int(np.prod(c["layout"])), metrics=metrics, num_layers=NUM_LAYERS, **flags(c))
    reference = alone[c["masked"]]
    assert len(lines) == len(reference) == 20
    for key in ("lm_loss", "grad_norm"):
        ours, expected = ([line[key] for line in run] for run in (lines, reference))
        np.testing.assert_allclose(ours, expected, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("c", CORE, ids=name)
def test_core(c: Combination, corpus: Path, alone: dict[bool, list[dict]], tmp_path: Path):
    assert is_valid(c)
    check(c, corpus, alone, tmp_path / "metrics.jsonl")


@pytest.mark.long
@pytest.mark.parametrize("c", LONG, ids=name)
def test_every_two_choices(c: Combination, corpus: Path, alone: dict[bool, list[dict]], tmp_path: Path):
    check(c, corpus, alone, tmp_path / "metrics.jsonl")
