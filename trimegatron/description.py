"""What a run says of itself before it starts."""

from __future__ import annotations

from trimegatron.config import Config
from trimegatron.config.groups import ParallelConfig
from trimegatron.config.schedule import Schedule
from trimegatron.mesh import Mesh
from trimegatron.metrics import metrics_path
from trimegatron.model.build import stage_layers
from trimegatron.model.spec import GPTSpec
from trimegatron.pipeline_parallel.engine import runs_as


def describe(config: Config, mesh: Mesh, spec: GPTSpec, schedule: Schedule, *, num_buckets: int) -> str:
    """A few lines on what is about to run."""
    training = config.training
    batch, sizes = training.global_batch_size, training.batch_sizes
    lines = [
        f"GPT with {spec.num_parameters / 1e6:.2f} M parameters, {config.precision.params_dtype}, on "
        f"{mesh.world.size} × {mesh.device.type}: data {mesh.data.size} × tensor {mesh.tensor.size} × pipeline "
        f"{mesh.pipeline.size} parallel{', sequence parallel' if config.parallel.sequence_parallel else ''}",
        f"a step is {batch} samples of {config.data.seq_length} tokens, in {config.num_micro_batches} micro-batches of "
        f"{training.micro_batch_size} on each of {mesh.data.size} data-parallel ranks",
        f"learning rate: {schedule.start_lr:g} to {schedule.lr:g} over iterations 0 to "
        f"{sizes.iteration_at(schedule.warmup_samples):g}, {schedule.style} to "
        f"{schedule.min_lr:g} at {sizes.iteration_at(schedule.decay_samples):g} (warm-up included); the run "
        f"ends at {training.train_iters}",
    ]
    if mesh.pipeline.size > 1:
        lines.insert(1, describe_pipeline(config))
    if sizes.start < batch:
        lines.insert(
            2, f"until sample {sizes.ramp_samples}: steps of {sizes.start} samples and {sizes.increment} more at a time"
        )
    if mesh.data.size > 1:
        lines.append(describe_data_parallel(config.parallel, num_buckets))
    path = metrics_path(config)
    lines.append(f"metrics: {path}" if path else "metrics are not written: give --save or --metrics-file")
    return "\n".join(lines)


def describe_pipeline(config: Config) -> str:
    """The schedule, and the layers of each rank's stages."""
    num_ranks, num_micro_batches = config.parallel.pipeline_model_parallel_size, config.num_micro_batches
    stages = stage_layers(config)
    ranks = [
        " and ".join(
            f"{layers[0]}–{layers[-1]}" if len(layers) > 1 else str(layers[0]) for layers in stages[rank::num_ranks]
        )
        for rank in range(num_ranks)
    ]
    asked = config.parallel.pipeline_schedule
    schedule = runs_as(asked, num_micro_batches, len(stages))
    why = "" if schedule == asked else f" ({asked} needs a micro-batch for each of {len(stages)} stages)"
    return f"pipeline schedule {schedule}{why}; layers of the ranks: {' | '.join(ranks)}"


def describe_data_parallel(parallel: ParallelConfig, num_buckets: int) -> str:
    """When gradients are summed, and where the optimizer's state is."""
    when = "during" if parallel.overlap_grad_reduce else "after"
    state = (
        f"1/{parallel.data_parallel_size} on each data-parallel rank"
        if parallel.use_distributed_optimizer
        else "all of it on every data-parallel rank"
    )
    return (
        f"gradients: {num_buckets} buckets, summed over data parallelism {when} the backward pass; optimizer state: "
        f"{state}"
    )
