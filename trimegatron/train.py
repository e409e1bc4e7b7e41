"""The entry of ``torchrun -m trimegatron.train`` and of ``python -m trimegatron.train``: parse, build, run, tear
down.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from trimegatron.activity import Activity
from trimegatron.checkpoint.checkpoint import Progress, load_checkpoint
from trimegatron.checkpoint.resume import choose_checkpoint, is_save_folder, resume_schedule
from trimegatron.checkpoint.saver import Saver, check_is_shared
from trimegatron.config import Config, read_train_args
from trimegatron.data.build import Datasets, build_datasets
from trimegatron.data.record import DataRecord
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.description import describe
from trimegatron.errors import StoppedError, UserError, complain
from trimegatron.kernel_table import use_kernel_table
from trimegatron.mesh import Mesh, close_mesh, init_mesh, launched_world_size
from trimegatron.metrics import Interval, MetricsWriter
from trimegatron.model.build import build_model, model_spec, wait_for_parameters
from trimegatron.model.gpt import GPTChunks
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.scaler import DynamicLossScaler, LossScaler
from trimegatron.pipeline_parallel.engine import Engine
from trimegatron.preflight import prepare
from trimegatron.stopping import SignalTrap, Stopping
from trimegatron.store import StoreLostError
from trimegatron.together import on_every_rank
from trimegatron.tokenizer import Tokenizer
from trimegatron.trainer import Trainer
from trimegatron.watch import Watch, prepare_flight_record

Say = Callable[[str], None]
"""Prints a line on the first rank; on the others it does nothing."""


def main(argv: list[str] | None = None) -> int:
    """Train; returns the exit code (docs/interface.md). Of several ranks with the same error one speaks."""
    mesh: Mesh | None = None
    activity = Activity()
    with SignalTrap() as trap:
        try:
            command = read_train_args(sys.argv[1:] if argv is None else argv, world_size=launched_world_size())
            if command.explain:
                if is_first_of_node():
                    print(command.text(), end="")
                return 0
            if command.dry_run:
                from trimegatron.dry_run import dry_run  # it builds what this module builds

                dry_run(command)
                return 0
            if command.config.training.exit_signal is not None:
                trap.add(command.config.training.exit_signal)
            config, tokenizer, device, notes = prepare(command)
            mesh = join(config, device)
            notes += use_kernel_table(config, mesh)
            say: Say = partial(print, flush=True) if mesh.is_first_rank else _silent
            for note in notes:
                say(f"note: {note}")
            with watch(config, mesh, activity):
                return run(config, mesh, tokenizer, say, trap, activity)
        except (UserError, OSError) as error:
            exit_code = error.exit_code if isinstance(error, UserError) else 1
            speaks = is_first_of_node()  # until the mesh is there every rank meets the same error, unless nodes differ
            if mesh is not None:
                speaks, exit_code = mesh.report_failure(exit_code)
            if speaks:
                complain("train", str(error), is_error=not isinstance(error, StoppedError))
        except Exception as error:  # nobody foresaw it; or a collective broke because another rank is gone
            if mesh is None:
                raise
            trap.is_over = True  # the launcher of a rank that was killed ends the others
            speaks, exit_code = mesh.report_failure(1)
            if speaks:
                complain("train", f"rank {mesh.world.rank}, {activity}: {cause_of(error, mesh)}")
        finally:
            close_mesh()
        if mesh is not None:
            # Here nothing of the run is left but the mesh. Without the groups too, what others wait in breaks.
            mesh = mesh.without_groups()
            gc.collect()
            mesh.wait_until_known()
        return exit_code


def join(config: Config, device: torch.device) -> Mesh:
    """The mesh of all ranks."""
    if device.type == "cuda":
        prepare_flight_record()
    return init_mesh(
        device,
        tensor_parallel_size=config.parallel.tensor_model_parallel_size,
        pipeline_parallel_size=config.parallel.pipeline_model_parallel_size,
        backend=config.parallel.distributed_backend,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
        async_save=config.checkpoint.async_save,
    )


def watch(config: Config, mesh: Mesh, activity: Activity) -> Watch:
    """The thread that ends this rank when the run is over without it."""
    save = config.checkpoint.save
    limit = config.parallel.hang_timeout_in_mins * 60.0
    return Watch(mesh, activity, limit=limit, folder=Path(save) if save else None)


def run(config: Config, mesh: Mesh, tokenizer: Tokenizer, say: Say, trap: SignalTrap, activity: Activity) -> int:
    """Build everything the configuration asks for, and train; returns the exit code."""
    if config.checkpoint.save and not config.training.skip_train:
        check_is_shared(Path(config.checkpoint.save), mesh)
    checkpoint = choose_checkpoint(config, mesh, say)
    trainer = build_trainer(config, mesh, tokenizer, checkpoint, say, trap=trap, activity=activity)
    trap.is_starting = False
    try:
        if config.training.skip_train:
            trainer.evaluate_only()
            return 0
        return trainer.train()
    finally:
        trainer.metrics.close()


def build_trainer(
    config: Config,
    mesh: Mesh,
    tokenizer: Tokenizer,
    checkpoint: Path | None,
    say: Say,
    *,
    data: tuple[Datasets, DataRecord] | None = None,
    trap: SignalTrap | None = None,
    activity: Activity | None = None,
) -> Trainer:
    """The trainer, at the start of the run or where ``checkpoint`` left it; on ``data`` in place of the files'."""
    activity = activity or Activity()
    activity.note("preparing the data")
    datasets, data_record = data or on_every_rank(
        mesh, lambda: build_datasets(config, mesh.data.size, say), what="preparing the data", say=say
    )
    activity.note("building the model")
    model = build_model(config, mesh)
    buffer = build_buffer(config, model, mesh)
    optimizer = FlatAdamW(
        buffer,
        beta1=config.optimizer.adam_beta1,
        beta2=config.optimizer.adam_beta2,
        epsilon=config.optimizer.adam_eps,
        kernels=config.model.kernels,
    )
    scaler = build_scaler(config)
    progress = Progress()
    interval = Interval()
    schedule = config.schedule
    if checkpoint is not None:
        activity.note("loading the checkpoint")
        with_optimizer = not (config.checkpoint.finetune or config.checkpoint.no_load_optim)
        state = load_checkpoint(
            checkpoint, config=config, optimizer=optimizer, mesh=mesh, with_optimizer=with_optimizer
        )
        if not config.checkpoint.finetune:
            progress, interval = state.progress, Interval(**state.interval)
            for line in data_record.resume(state.data, progress.consumed_samples):
                say(f"note: {line}")
        if with_optimizer:
            scaler.load(state.scaler)
            schedule = resume_schedule(config, state)
        say(f"loaded {checkpoint}; going on at iteration {progress.iteration}")
    spec = model_spec(config, tensor=mesh.tensor, device=mesh.device)
    engine = Engine(
        model,
        pipeline=mesh.pipeline,
        schedule=config.parallel.pipeline_schedule,
        activation=spec.activation(config.data.seq_length, config.training.micro_batch_size),
    )
    metrics = MetricsWriter(config, spec, mesh, iteration=progress.iteration, interval=interval)
    say(describe(config, mesh, spec, schedule, num_buckets=len(buffer.buckets)))
    trainer = Trainer(
        config,
        mesh=mesh,
        model=model,
        engine=engine,
        optimizer=optimizer,
        scaler=scaler,
        schedule=schedule,
        datasets=datasets,
        tokenizer=tokenizer,
        metrics=metrics,
        progress=progress,
        data_record=data_record,
        stopping=Stopping(config, looks_for_file=mesh.is_first_rank, trap=trap or SignalTrap(), say=say),
        saver=Saver(config, tokenizer=tokenizer, mesh=mesh, activity=activity, say=say),
        activity=activity,
    )
    if checkpoint is not None and progress.iteration > 0 and is_save_folder(config, checkpoint.parent):
        trainer.saver.saved_at = progress.iteration
    return trainer


def build_buffer(config: Config, model: GPTChunks, mesh: Mesh) -> ParameterBuffer:
    """The flat buffers that ``model``'s parameters and their main gradients move into."""
    precision, parallel = config.precision, config.parallel
    fp32_grads = precision.accumulate_allreduce_grads_in_fp32 or precision.params_dtype == "float32"
    buffer = ParameterBuffer(
        model.named_parameters(),
        grad_dtype=torch.float32 if fp32_grads else getattr(torch, precision.params_dtype),
        mesh=mesh,
        bucket_size=parallel.ddp_bucket_size,
        shard_optimizer=parallel.use_distributed_optimizer,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    if parallel.overlap_param_gather:
        wait_for_parameters(model, buffer)
    return buffer


def build_scaler(config: Config) -> LossScaler:
    """Dynamic for fp16 unless a constant scale is given; 1 for fp32 and bf16."""
    precision = config.precision
    if not precision.fp16:
        return LossScaler()
    if precision.loss_scale is not None:
        return LossScaler(precision.loss_scale)
    return DynamicLossScaler(
        precision.initial_loss_scale, precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis
    )


def cause_of(error: Exception, mesh: Mesh) -> str:
    """Why this rank fails, behind a traceback unless it is that another one is gone: a collective's error does not say
    who broke it off."""
    gone = mesh.who_is_gone() if isinstance(error, RuntimeError) else None
    if gone is None:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return gone if isinstance(error, StoreLostError) else f"{gone} ({type(error).__name__}: {error})"


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _silent(*_: object, **__: object) -> None:
    """What the other ranks say."""


if __name__ == "__main__":
    sys.exit(main())
