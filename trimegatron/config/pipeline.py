"""The rules of pipeline parallelism: which schedules there are, and how layers and micro-batches must divide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimegatron.config.options import fail

if TYPE_CHECKING:
    from trimegatron.config.config import Config
    from trimegatron.config.groups import ParallelConfig

SCHEDULES = ("gpipe", "1f1b", "interleaved")
ZERO_BUBBLE = ("zerobubble", "dualpipe", "zb")
"""What the names of schedules begin with, or hold, that split the backward pass in two."""


def check_pipeline_schedule(schedule: str, layers_per_stage: int | None) -> None:
    """There is such a schedule; and it runs one stage on each rank, or several, as asked."""
    plain = schedule.lower().replace("-", "").replace("_", "")
    if any(name in plain for name in ZERO_BUBBLE):
        fail(
            "pipeline_schedule",
            schedule,
            "is not offered: torch's split backward pass runs that of each fused operation twice, so gradients and "
            "collectives would double",
            way_out="Use 1f1b or interleaved.",
        )
    if schedule not in SCHEDULES:
        fail("pipeline_schedule", schedule, f"must be one of {', '.join(SCHEDULES)}")
    if schedule == "interleaved" and layers_per_stage is None:
        fail(
            "pipeline_schedule",
            schedule,
            "needs --num-layers-per-virtual-pipeline-stage",
            way_out="Say how many layers a stage has, or use 1f1b.",
        )
    if schedule != "interleaved" and layers_per_stage is not None:
        fail(
            "pipeline_schedule",
            schedule,
            f"and --num-layers-per-virtual-pipeline-stage ({layers_per_stage}) exclude each other: it runs one stage "
            "on each rank",
            way_out="Leave one of the two out.",
        )


def check_num_micro_batches(num_micro_batches: int, parallel: ParallelConfig) -> None:
    """The schedule can run a step of so many micro-batches: every number, but where stages are interleaved."""
    pp, layers_per_stage = parallel.pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    if layers_per_stage is not None and num_micro_batches % pp:
        fail(
            "num_layers_per_virtual_pipeline_stage",
            layers_per_stage,
            "needs a number of micro-batches in each step (global batch / micro-batch size / data parallel size) that "
            f"is a multiple of --pipeline-model-parallel-size ({pp})",
            f"it is {num_micro_batches}",
            "Change --global-batch-size or --micro-batch-size, or leave the option out.",
        )


def check_stages(config: Config) -> None:
    """Every pipeline stage has layers, and all the same number but those whose number is given."""
    parallel, num_layers = config.parallel, config.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    virtual, first, last = (
        "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
    )
    given = {name: size for name in (virtual, first, last) if (size := getattr(parallel, name)) is not None}
    if given and pp == 1:
        name, size = next(iter(given.items()))
        fail(name, size, "needs --pipeline-model-parallel-size above 1", way_out="Leave it out.")
    if virtual in given:
        _check_virtual_stages(num_layers, pp, given.pop(virtual), uneven=given)
    elif given:
        _check_uneven_stages(num_layers, pp, given)
    elif num_layers % pp:
        fail(
            "pipeline_model_parallel_size",
            pp,
            f"must divide --num-layers ({num_layers})",
            f"the division leaves {num_layers % pp}",
            "Change one of the two, or give the first or the last stage a number of its own with "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers.",
        )


def _check_virtual_stages(num_layers: int, pp: int, size: int, *, uneven: dict[str, int]) -> None:
    for name, value in uneven.items():
        fail(
            name,
            value,
            f"and --num-layers-per-virtual-pipeline-stage ({size}) exclude each other",
            way_out="Leave one of the two out.",
        )
    if num_layers % (pp * size) or num_layers == pp * size:
        fail(
            "num_layers_per_virtual_pipeline_stage",
            size,
            f"x --pipeline-model-parallel-size ({pp}) must divide --num-layers ({num_layers}), into two or more",
            f"the product is {pp * size}",
            "Change one of the three, or leave the option out for one stage on each rank.",
        )


def _check_uneven_stages(num_layers: int, pp: int, given: dict[str, int]) -> None:
    rest, others = num_layers - sum(given.values()), pp - len(given)
    if (rest <= 0 or rest % others) if others else rest:
        name, sizes = next(iter(given)), list(given.values())
        both = f"and --decoder-last-pipeline-num-layers ({sizes[1]}) " if len(sizes) > 1 else ""
        rule = f"layers for {others} equal stages" if others else "none"
        fail(
            name,
            sizes[0],
            f"{both}must leave, of --num-layers ({num_layers}), {rule}",
            f"{rest} are left",
            "Change the numbers of layers.",
        )
