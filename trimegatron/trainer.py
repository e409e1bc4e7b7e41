"""The training loop: the only one.

One step: micro-batches forward and backward, gradients summed over data parallel, one norm, one factor, one
optimizer launch. docs/architecture.md follows a sample through it; docs/gradients.md says who divides by what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn

from trimegatron.activity import Activity
from trimegatron.checkpoint.checkpoint import Progress
from trimegatron.checkpoint.saver import Saver
from trimegatron.checkpoint.snapshot import Snapshot, take_snapshot
from trimegatron.config import Config
from trimegatron.config.schedule import Schedule
from trimegatron.data.build import Datasets
from trimegatron.data.cyclic import SampleDataset
from trimegatron.data.loader import Batch
from trimegatron.data.record import DataRecord
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.divergence import check_overflow
from trimegatron.errors import ConfigError
from trimegatron.feed import Feed
from trimegatron.garbage import GarbageCollection
from trimegatron.mesh import Mesh
from trimegatron.metrics import MetricsWriter
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.gradients import clip_factor, squared_norms
from trimegatron.optim.scaler import LossScaler
from trimegatron.pipeline_parallel.engine import Engine
from trimegatron.stopping import Stopping
from trimegatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class StepResult:
    """What one step came to. Norms are unscaled and before clipping."""

    loss: float
    grad_norm: float
    grad_norm_decayed: float
    """Of the parameters that weight decay acts on."""
    grad_norm_others: float
    is_skipped: bool
    num_samples: int


class Trainer:
    """Everything one rank trains with, and the loop over it."""

    def __init__(
        self,
        config: Config,
        *,
        mesh: Mesh,
        model: nn.Module,
        engine: Engine,
        optimizer: FlatAdamW,
        scaler: LossScaler,
        schedule: Schedule,
        datasets: Datasets,
        tokenizer: Tokenizer,
        metrics: MetricsWriter,
        progress: Progress,
        data_record: DataRecord,
        stopping: Stopping,
        saver: Saver,
        activity: Activity,
    ):
        self.config = config
        self.mesh = mesh
        self.model = model
        self.engine = engine
        self.optimizer = optimizer
        self.buffer: ParameterBuffer = optimizer.buffer
        self.scaler = scaler
        self.schedule = schedule
        self.datasets = datasets
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.progress = progress
        self.data_record = data_record
        self.stopping = stopping
        self.saver = saver
        self.activity = activity
        self.feed = Feed(config, mesh=mesh, tokenizer=tokenizer, activity=activity)
        self.loader = self.feed.loader
        self.garbage = GarbageCollection(config.training)
        self.a_save_failed = False

    def train(self) -> int:
        """Train to ``train_iters``, or until something ends the run; evaluate and save on the way and at the end.

        Returns:
            The exit code: 0, or that of a run that a signal or the stop file has ended.

        Raises:
            CheckpointError: the last save failed; or an earlier one, with ``--on-save-error stop``.
        """
        config, progress = self.config, self.progress
        training = config.training
        if self.is_finished():
            self.say(f"nothing is left to train: iteration {progress.iteration} of {training.train_iters} is reached")
            self.save_the_end()
            return 0
        if config.checkpoint.save and config.checkpoint.async_save:
            self.saver.reserve(self.snapshot())
        if training.eval_at_start and progress.iteration == 0:
            self.validate()
            if self.stopping.is_asked and self.stopping.stops_at(0):  # there is nothing to save
                return self.stopping.exit_code
        self.model.train()
        with self.garbage, closing(self.loader(self.datasets.train, progress.consumed_samples)) as batches:
            if (note := self.feed.missing_boundaries(self.datasets.train)) is not None:
                self.say(f"note: {note}")
            self.metrics.start_clock()
            while not self.is_finished():
                self.step_and_report(batches)
                self.garbage.after_step(progress.iteration)
                if training.eval_iters > 0 and progress.iteration % training.eval_interval == 0:
                    with self.garbage.around_evaluation():
                        self.validate()
                if self.a_save_failed:
                    self.saver.wait()
                if config.checkpoint.save and progress.iteration % (config.checkpoint.save_interval or 1) == 0:
                    self.save()
                if self.stopping.stops_at(progress.iteration):
                    break
        self.buffer.wait_for_params()  # what the last update still sends
        self.save_the_end()
        if not self.is_finished():
            self.stopping.take_file_away()
            return self.stopping.exit_code
        if training.eval_iters > 0:
            if progress.iteration % training.eval_interval != 0:  # else it was just evaluated
                self.validate()
            self.evaluate("test", self.datasets.test, window=0)
        return 0

    def evaluate_only(self) -> None:
        """``--skip-train``: the losses that a training run measures at this iteration.

        Raises:
            ConfigError: there is no data to evaluate on.
        """
        if self.datasets.valid is None and self.datasets.test is None:
            raise ConfigError("--skip-train needs validation or test data. Give them a share of --split, or their own")
        self.validate()
        self.evaluate("test", self.datasets.test, window=0)

    @property
    def batch_size(self) -> int:
        """Samples of the next step, all replicas together."""
        return self.config.training.batch_sizes.at(self.progress.consumed_samples)

    def is_finished(self) -> bool:
        """Whether the run's iterations are done, or its samples where it is one by samples."""
        training, progress = self.config.training, self.progress
        if training.train_samples is not None:
            return progress.consumed_samples + self.batch_size > training.train_samples
        return progress.iteration >= training.train_iters

    def step_and_report(self, batches: Iterator[Batch]) -> None:
        """One training step, and its line: rate and loss scale are those after the step, as Megatron's."""
        progress = self.progress
        self.activity.iteration = progress.iteration + 1
        result = self.train_step(batches)
        progress.iteration += 1
        progress.consumed_samples += result.num_samples
        if result.is_skipped:
            progress.skipped_iterations += 1
            progress.skipped_in_a_row += 1
        else:
            progress.skipped_in_a_row = 0
            progress.scheduled_samples += result.num_samples
        is_nan = not math.isfinite(result.loss)
        progress.nan_iterations += is_nan
        self.metrics.step(
            {
                "iteration": progress.iteration,
                "consumed_samples": progress.consumed_samples,
                "lm_loss": result.loss,
                "learning_rate": self.schedule.learning_rate(progress.scheduled_samples),
                "grad_norm": result.grad_norm,
                "loss_scale": self.scaler.scale,
                "skipped": int(result.is_skipped),
                "nan": int(is_nan),
                **self.optional_norms(result),
            },
            num_samples=result.num_samples,
            is_last=self.is_finished(),
        )

    def train_step(self, batches: Iterator[Batch]) -> StepResult:
        """Forward and backward over the micro-batches of one global batch, then one optimizer step.

        Backward starts from Σ loss · scale / (global batch · sequence length), a constant, so that every way of
        cutting the batch gives the same gradient; the factor to the mean over the unmasked tokens comes after the
        sum over ranks.
        """
        config, num_samples = self.config, self.batch_size
        num_micro_batches = config.micro_batches_of(num_samples)
        all_tokens = num_samples * config.data.seq_length
        self.buffer.start(num_micro_batches)
        loss_sum, num_tokens = self.engine.run(
            self.feed.take(batches, num_micro_batches), backward_scale=self.scaler.scale / all_tokens
        )
        self.activity.note("summing gradients")
        self.buffer.finish()
        squares = squared_norms(self.buffer.counted_grads(), device=self.mesh.device, kernels=config.model.kernels)
        loss_sum, num_tokens, *squares_of_groups, wishes = self.sum_over_ranks(
            replica=(loss_sum, num_tokens), own=squares
        )
        tokens = num_tokens.clamp(min=1.0)
        unscale = all_tokens / (tokens * self.scaler.scale)
        norm, *norms_of_groups = (
            squared.sqrt() * unscale for squared in (squares_of_groups[0] + squares_of_groups[1], *squares_of_groups)
        )
        # The one wait of the step: the host must know before it launches the update.
        loss, grad_norm, decayed, others, *wished = torch.cat(
            [torch.stack([loss_sum / tokens, norm, *norms_of_groups]), wishes]
        ).tolist()
        self.heed(wished)
        overflowed = not math.isfinite(grad_norm)
        if overflowed:
            check_overflow(
                config,
                self.progress,
                self.data_record,
                loss=loss,
                loss_scale=self.scaler.scale,
                num_samples=num_samples,
            )
        else:
            progress = self.progress
            self.activity.note("updating the weights")
            self.optimizer.step(
                lr=self.schedule.learning_rate(progress.scheduled_samples),
                weight_decay=self.schedule.weight_decay(progress.scheduled_samples),
                grad_multiplier=unscale * clip_factor(norm, config.optimizer.clip_grad),
            )
        self.scaler.update(overflowed)
        return StepResult(loss, grad_norm, decayed, others, is_skipped=overflowed, num_samples=num_samples)

    def validate(self) -> None:
        """The validation loss at this iteration. Each evaluation of a run has its own samples; so the end of an
        interval has those of the interval, and an iteration within one those that its end would have."""
        window = max(0, self.progress.iteration - 1) // self.config.training.eval_interval
        self.evaluate("valid", self.datasets.valid, window=window)

    @torch.no_grad()
    def evaluate(self, split: str, dataset: SampleDataset | None, *, window: int) -> None:
        """The loss over ``eval_iters`` global batches of ``dataset``: number ``window`` of its runs of that many."""
        if dataset is None:
            return
        config = self.config
        eval_iters = config.training.eval_iters
        with self.metrics.pause():
            self.model.eval()
            first_sample = window * eval_iters * config.training.global_batch_size
            totals = torch.zeros(3, device=self.mesh.device, dtype=torch.float64)
            with closing(self.loader(dataset, first_sample)) as batches:
                for _ in range(eval_iters):
                    micro_batches = list(self.feed.take(batches, config.num_micro_batches))
                    loss_sum, num_tokens = self.engine.run(micro_batches, backward_scale=None)
                    totals += torch.stack([loss_sum, num_tokens, self.feed.count_bytes(micro_batches)])
            self.model.train()
            *sums, wishes = self.sum_over_ranks(replica=totals)
            loss, tokens, text_bytes = torch.stack(sums).tolist()
            self.heed(wishes.tolist())
            bits_per_byte = loss / math.log(2.0) / text_bytes if text_bytes > 0 else None
            self.metrics.evaluation(split, self.progress.iteration, loss / max(tokens, 1.0), bits_per_byte)

    def save(self, *, must_succeed: bool = False) -> None:
        """Save a checkpoint of this moment."""
        with self.metrics.pause():
            answers = self.saver.save(self.snapshot(), ask=self.wishes, must_succeed=must_succeed)
            if answers:
                self.heed(answers)

    def snapshot(self) -> Snapshot:
        """What a checkpoint holds of this moment."""
        return take_snapshot(
            self.config,
            self.progress,
            self.optimizer,
            scaler=self.scaler.state(),
            data=self.data_record.state(self.progress.consumed_samples),
            interval=asdict(self.metrics.interval),
        )

    def save_the_end(self) -> None:
        """See to it that this moment is saved, whatever went wrong before."""
        if self.config.checkpoint.save:
            self.saver.wait()
            if self.saver.saved_at != self.progress.iteration:
                self.save(must_succeed=True)

    def wishes(self) -> list[float]:
        """What this rank wants the others to know; a part of a sum over all ranks."""
        return [*self.stopping.wishes(), float(self.saver.has_failed())]

    def heed(self, sums: Sequence[float]) -> None:
        """Take what all ranks wish."""
        *stopping, failed = sums
        self.stopping.heed(stopping)
        self.a_save_failed |= failed > 0

    def sum_over_ranks(
        self, *, replica: Iterable[torch.Tensor] = (), own: Iterable[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Sums of scalars over the whole run, on every rank, in one all-reduce in fp64; last those of all ``wishes``.

        Args:
            replica: what the last stage of a data-parallel replica holds, alike on its tensor-parallel ranks; other
                ranks hold anything.
            own: what each rank answers for.
        """
        answers = self.mesh.is_last_stage and self.mesh.tensor.rank == 0
        values = [value.double() if answers else value.new_zeros((), dtype=torch.float64) for value in replica]
        scalars = [*values, *(value.double() for value in own)]
        wishes = torch.tensor(self.wishes(), dtype=torch.float64).to(self.mesh.device, non_blocking=True)
        sums = torch.cat([torch.stack(scalars), wishes])
        if self.mesh.world.group is not None:
            self.activity.note("summing over all ranks")
            dist.all_reduce(sums, group=self.mesh.world.group)
        return *sums[: len(scalars)].unbind(), sums[len(scalars) :]

    def optional_norms(self, result: StepResult) -> dict[str, float]:
        """What ``--log-params-norm``, ``--log-num-zeros-in-grad`` and ``--log-grad-norm-by-group`` ask for."""
        logging, kernels = self.config.logging, self.config.model.kernels
        own: dict[str, torch.Tensor] = {}
        if logging.log_params_norm:
            parts = self.optimizer.counted_master()
            own["params_norm"] = torch.stack(squared_norms(parts, device=self.mesh.device, kernels=kernels)).sum()
        if logging.log_num_zeros_in_grad:
            own["num_zeros"] = self.buffer.count_zero_grads()
        values: dict[str, float] = {}
        if own:
            *sums, wishes = self.sum_over_ranks(own=own.values())
            values = dict(zip(own, torch.stack(sums).tolist(), strict=True))
            self.heed(wishes.tolist())
        if logging.log_params_norm:
            values["params_norm"] = math.sqrt(values["params_norm"])
        if logging.log_num_zeros_in_grad:
            values["num_zeros"] = int(values["num_zeros"])
        if logging.log_grad_norm_by_group:
            values |= {
                "grad_norm_decayed": result.grad_norm_decayed,
                "grad_norm_others": result.grad_norm_others,
            }
        return values

    def say(self, line: str) -> None:
        """Print a line, once."""
        if self.mesh.is_first_rank:
            print(line, flush=True)
