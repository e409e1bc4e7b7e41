"""The training loop: the only one.

One step: micro-batches forward and backward, gradients summed over data parallel, one norm, one factor, one
optimizer launch. docs/architecture.md follows a sample through it; docs/gradients.md says who divides by what.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trimegatron.checkpoint.checkpoint import Progress, save_checkpoint
from trimegatron.config import Config
from trimegatron.config.schedule import Schedule
from trimegatron.data.boundaries import DocumentBoundaries
from trimegatron.data.build import Datasets
from trimegatron.data.cyclic import SampleDataset
from trimegatron.data.loader import Batch, build_loader
from trimegatron.data.record import DataRecord
from trimegatron.data_parallel.buffer import ParameterBuffer
from trimegatron.divergence import check_overflow
from trimegatron.errors import ConfigError, DataError
from trimegatron.garbage import GarbageCollection
from trimegatron.mesh import Mesh
from trimegatron.metrics import MetricsWriter
from trimegatron.optim.adamw import FlatAdamW
from trimegatron.optim.gradients import clip_factor, squared_norms
from trimegatron.optim.scaler import LossScaler
from trimegatron.pipeline_parallel.engine import Engine
from trimegatron.tokenizer import Tokenizer

LOOKED_AT = 256
"""Samples searched for an end of a document before training; a few milliseconds."""


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
        self.boundaries = DocumentBoundaries(
            tokenizer.eod,
            eod_mask_loss=config.data.eod_mask_loss,
            reset_position_ids=config.data.reset_position_ids,
            reset_attention_mask=config.data.reset_attention_mask,
        )
        self.garbage = GarbageCollection(config.training)
        self.started = time.monotonic()
        self.saved_at: int | None = None
        token_bytes = tokenizer.token_bytes()
        self.token_bytes = None if token_bytes is None else torch.from_numpy(token_bytes).to(mesh.device)

    def train(self) -> None:
        """Train to ``train_iters``, or until an exit condition; evaluate and save on the way and at the end."""
        config, progress = self.config, self.progress
        training, save = config.training, config.checkpoint.save
        if self.is_finished():
            self.say(f"nothing is left to train: iteration {progress.iteration} of {training.train_iters} is reached")
            if save and self.saved_at != progress.iteration:
                self.save()
            return
        if training.eval_at_start and progress.iteration == 0:
            self.validate()
        self.model.train()
        with self.garbage, closing(self.loader(self.datasets.train, progress.consumed_samples)) as batches:
            self.look_for_boundaries(self.datasets.train)
            self.metrics.start_clock()
            while not self.is_finished():
                self.step_and_report(batches)
                self.garbage.after_step(progress.iteration)
                if training.eval_iters > 0 and progress.iteration % training.eval_interval == 0:
                    with self.garbage.around_evaluation():
                        self.validate()
                if save and progress.iteration % (config.checkpoint.save_interval or training.train_iters) == 0:
                    self.save()
                if self.should_exit():
                    break
        self.buffer.wait_for_params()  # what the last update still sends
        if save and self.saved_at != progress.iteration:
            self.save()
        if self.is_finished() and training.eval_iters > 0:
            if progress.iteration % training.eval_interval != 0:  # else it was just evaluated
                self.validate()
            self.evaluate("test", self.datasets.test, window=0)

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

    def should_exit(self) -> bool:
        """Whether ``--exit-interval`` or ``--exit-duration-in-mins`` ends the run here: one answer for all ranks."""
        training, iteration = self.config.training, self.progress.iteration
        if training.exit_interval is not None and iteration % training.exit_interval == 0:
            self.say(f"--exit-interval {training.exit_interval}: stopping at iteration {iteration}")
            return True
        minutes = training.exit_duration_in_mins
        if minutes is not None and self.mesh.maximum(time.monotonic() - self.started) > minutes * 60.0:
            self.say(f"--exit-duration-in-mins {minutes}: stopping at iteration {iteration}")
            return True
        return False

    def step_and_report(self, batches: Iterator[Batch]) -> None:
        """One training step, and its line: rate and loss scale are those after the step, as Megatron's."""
        progress = self.progress
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
            self.take(batches, num_micro_batches), backward_scale=self.scaler.scale / all_tokens
        )
        self.buffer.finish()
        squares = squared_norms(self.buffer.counted_grads(), device=self.mesh.device, kernels=config.model.kernels)
        loss_sum, num_tokens, *squares_of_groups = self.sum_over_ranks(replica=(loss_sum, num_tokens), own=squares)
        tokens = num_tokens.clamp(min=1.0)
        unscale = all_tokens / (tokens * self.scaler.scale)
        norm, *norms_of_groups = (
            squared.sqrt() * unscale for squared in (squares_of_groups[0] + squares_of_groups[1], *squares_of_groups)
        )
        # The one wait of the step: the host must know before it launches the update.
        loss, grad_norm, decayed, others = torch.stack([loss_sum / tokens, norm, *norms_of_groups]).tolist()
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
                    micro_batches = list(self.take(batches, config.num_micro_batches))
                    loss_sum, num_tokens = self.engine.run(micro_batches, backward_scale=None)
                    totals += torch.stack([loss_sum, num_tokens, self.count_bytes(micro_batches)])
            self.model.train()
            loss, tokens, text_bytes = (float(total) for total in self.sum_over_ranks(replica=totals))
            bits_per_byte = loss / math.log(2.0) / text_bytes if text_bytes > 0 else None
            self.metrics.evaluation(split, self.progress.iteration, loss / max(tokens, 1.0), bits_per_byte)

    def count_bytes(self, batches: list[Batch]) -> torch.Tensor:
        """Bytes of text in the labels that count; 0 where the tokenizer cannot say."""
        total = torch.zeros((), device=self.mesh.device)
        if self.token_bytes is not None:
            for batch in batches:
                total += (self.token_bytes[batch.labels] * batch.loss_mask).sum()
        return total

    def save(self) -> None:
        """Save a checkpoint of this moment."""
        with self.metrics.pause():
            started = time.perf_counter()
            folder = save_checkpoint(
                Path(self.config.checkpoint.save or ""),
                config=self.config,
                progress=self.progress,
                optimizer=self.optimizer,
                scaler=self.scaler.state(),
                data=self.data_record.state(self.progress.consumed_samples),
                interval=asdict(self.metrics.interval),
                tokenizer=self.tokenizer,
                mesh=self.mesh,
            )
            self.saved_at = self.progress.iteration
            self.say(f"saved {folder} in {time.perf_counter() - started:.1f} s")

    def loader(self, dataset: SampleDataset, consumed_samples: int) -> Generator[Batch]:
        """Micro-batches of this rank, from ``consumed_samples`` on."""
        config = self.config
        return build_loader(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=self.mesh.data.rank,
            data_parallel_size=self.mesh.data.size,
            num_workers=config.data.num_workers,
            boundaries=self.boundaries,
            pin_memory=self.mesh.device.type == "cuda",
        )

    def look_for_boundaries(self, dataset: SampleDataset) -> None:
        """Say so where the data does not look as if the options about ends of documents could do anything."""
        if self.mesh.is_first_rank:
            note = self.boundaries.missing_from(dataset[i] for i in range(min(len(dataset), LOOKED_AT)))
            if note is not None:
                self.say(f"note: {note}")

    def take(self, batches: Iterator[Batch], num_micro_batches: int) -> Iterator[Batch]:
        """This rank's micro-batches of one global batch, on the device.

        Raises:
            DataError: an id is none of the vocabulary: looked up, it would be another rank's row or nobody's.
        """
        vocab_size = self.config.model.vocab_size
        for _ in range(num_micro_batches):
            batch = next(batches)
            largest = int(max(batch.tokens.max(), batch.labels.max()))
            if vocab_size is not None and largest >= vocab_size:
                raise DataError(
                    f"{' '.join(self.config.data.data_path)} holds the token id {largest}, but the vocabulary has "
                    f"{vocab_size} words. Was it preprocessed with another tokenizer?"
                )
            yield batch.to(self.mesh.device)

    def sum_over_ranks(
        self, *, replica: Iterable[torch.Tensor] = (), own: Iterable[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, ...]:
        """Sums of scalars over the whole run, on every rank, in one all-reduce in fp64.

        Args:
            replica: what the last stage of a data-parallel replica holds, alike on its tensor-parallel ranks; other
                ranks hold anything.
            own: what each rank answers for.
        """
        answers = self.mesh.is_last_stage and self.mesh.tensor.rank == 0
        values = [value.double() if answers else value.new_zeros((), dtype=torch.float64) for value in replica]
        stacked = torch.stack([*values, *(value.double() for value in own)])
        if self.mesh.world.group is not None:
            dist.all_reduce(stacked, group=self.mesh.world.group)
        return tuple(stacked.unbind())

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
            totals = torch.stack(self.sum_over_ranks(own=own.values())).tolist()
            values = dict(zip(own, totals, strict=True))
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
