"""What a run tells: Megatron's log line, ``metrics.jsonl``, and TensorBoard where asked for. Only the first rank
writes.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimegatron.checkpoint.directory import METRICS
from trimegatron.config import Config
from trimegatron.errors import ConfigError
from trimegatron.files import write_atomically
from trimegatron.mesh import Mesh
from trimegatron.model.spec import GPTSpec

PEAK_FLOPS = {  # dense bf16/fp16 tensor-core peak of one device, by the name torch gives
    "NVIDIA A100": 312e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L40S": 362e12,
}
"""The first that a name begins with counts. Source: NVIDIA's data sheets, without sparsity."""


def flops_per_token(spec: GPTSpec, seq_length: int) -> float:
    """Floating-point operations of the matrix products, forward and backward, for one token.

    Per layer 2 · (3hp + ph + 2hf) for the weights (p = heads · head size, f = MLP width) and 4sp for scores and
    weighted sum, counted in full as Megatron does although half is masked; 2hv for the head; backward costs twice
    the forward.
    """
    projection = spec.num_attention_heads * spec.kv_channels
    weights = 2 * (4 * spec.hidden_size * projection + 2 * spec.hidden_size * spec.ffn_hidden_size)
    attention = 4 * seq_length * projection
    head = 2 * spec.hidden_size * spec.padded_vocab_size
    return 3.0 * (spec.num_layers * (weights + attention) + head)


def peak_flops(device: torch.device) -> float | None:
    """The matrix peak of the device, or None where we do not know it: then no utilisation is claimed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if " MIG " in name:  # a part of a device
        return None
    return next((peak for known, peak in PEAK_FLOPS.items() if name.startswith(known)), None)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass
class Interval:
    """The steps since the last log line; a checkpoint carries it, so that a resumed run writes the same lines."""

    steps: int = 0
    losses: list[float] = field(default_factory=list)
    """Of the steps that were not skipped."""
    skipped: int = 0
    nans: int = 0


class MetricsWriter:
    """Sums up steps between log lines, and writes."""

    def __init__(
        self, config: Config, spec: GPTSpec, mesh: Mesh, *, iteration: int = 0, interval: Interval | None = None
    ):
        """``iteration`` is where the run goes on: what an interrupted one wrote beyond it is dropped.

        Raises:
            ConfigError: the metrics file is not one.
        """
        self.config = config
        self.mesh = mesh
        self.seq_length = config.data.seq_length
        self.flops_per_token = flops_per_token(spec, self.seq_length)
        self.peak_flops = peak_flops(mesh.device)
        self.path = metrics_path(config) if mesh.is_first_rank else None
        self.board: Any = None
        self.interval = interval or Interval()
        self.start_clock()
        is_training = not config.training.skip_train
        if self.path is not None and self.path.exists() and is_training:
            drop_lines_beyond(self.path, iteration)
        if mesh.is_first_rank and config.logging.tensorboard_dir and is_training:
            from torch.utils.tensorboard import SummaryWriter

            logging = config.logging
            self.board = SummaryWriter(
                logging.tensorboard_dir, max_queue=logging.tensorboard_queue_size, purge_step=iteration + 1
            )

    def start_clock(self) -> None:
        """Steps are timed from here: at the beginning, and after each line."""
        self.since = time.perf_counter()
        self.timed_steps = self.timed_samples = 0

    def pause(self) -> PausedClock:
        """Time spent inside (evaluation, saving) is not counted as step time."""
        return PausedClock(self)

    def step(self, values: dict[str, Any], *, num_samples: int, is_last: bool) -> None:
        """Take note of one training step of ``num_samples``; writes a line where the log interval or the run ends.

        ``values``: iteration, consumed_samples, lm_loss, learning_rate, grad_norm (None where skipped), loss_scale,
        skipped, nan, and what else there is to tell.
        """
        interval = self.interval
        self.timed_steps += 1
        self.timed_samples += num_samples
        interval.steps += 1
        interval.skipped += values["skipped"]
        interval.nans += values["nan"]
        if not values["skipped"]:
            interval.losses.append(values["lm_loss"])
        iteration = values["iteration"]
        if self.board is not None and iteration % self.config.logging.tensorboard_log_interval == 0:
            self._write_board(values)
        if iteration % self.config.logging.log_interval != 0 and not is_last:
            return
        seconds = time.perf_counter() - self.since
        samples_per_second = self.timed_samples / seconds
        values = values | {
            "lm_loss": _mean_loss(interval.losses, values["lm_loss"]),
            "skipped": interval.skipped,
            "nan": interval.nans,
            "tokens_per_second": samples_per_second * self.seq_length,
            "iteration_ms": seconds / self.timed_steps * 1000.0,
            "peak_memory_bytes": int(self.mesh.maximum(peak_memory_bytes(self.mesh.device))),
        }
        self.interval = Interval()
        self.start_clock()
        if self.mesh.is_first_rank:
            print(self._line(values, num_samples, self.samples_left(values) / samples_per_second), flush=True)
            self._append(values)

    def samples_left(self, values: dict[str, Any]) -> int:
        """What is still to be trained on."""
        training = self.config.training
        if training.train_samples is None:
            return (training.train_iters - values["iteration"]) * training.global_batch_size
        return max(0, self.config.num_samples - values["consumed_samples"])

    def _line(self, values: dict[str, Any], batch_size: int, seconds_left: float) -> str:
        training = self.config.training
        per_device = values["tokens_per_second"] * self.flops_per_token / self.mesh.world.size
        loss, norm = values["lm_loss"], values["grad_norm"]
        parts = [
            f"iteration {values['iteration']:8d}/{training.train_iters:8d}",
            f"consumed samples: {values['consumed_samples']:12d}",
            f"elapsed time per iteration (ms): {values['iteration_ms']:.1f}",
            f"learning rate: {values['learning_rate']:.3E}",
            f"global batch size: {batch_size:5d}",
            *([f"lm loss: {loss:.6E}"] if loss is not None else []),
            f"loss scale: {values['loss_scale']:.1f}",
            *([f"grad norm: {norm:.3f}"] if norm is not None else []),
            *(
                f"{name.replace('_', ' ')}: {values[name]:.6g}"
                for name in ("grad_norm_decayed", "grad_norm_others", "params_norm", "num_zeros")
                if name in values
            ),
            f"number of skipped iterations: {values['skipped']:3d}",
            f"number of nan iterations: {values['nan']:3d}",
            f"tokens per second: {values['tokens_per_second']:.0f}",
            f"TFLOP/s per device: {per_device / 1e12:.3g}",
            f"MFU: {f'{per_device / self.peak_flops:.1%}' if self.peak_flops else 'n/a'}",
            f"peak memory (GiB): {values['peak_memory_bytes'] / 2**30:.2f}",
            f"time left: {format_duration(seconds_left)}",
        ]
        return " " + " | ".join(parts) + " |"

    def evaluation(self, split: str, iteration: int, loss: float, bits_per_byte: float | None) -> None:
        """Write the result of one evaluation."""
        perplexity = math.exp(min(20.0, loss))  # capped as Megatron's
        if self.mesh.is_first_rank:
            bits = f" bits per byte: {bits_per_byte:.4f} |" if bits_per_byte is not None else ""
            name = {"valid": "validation", "test": "test"}[split]
            print(
                f" {name} loss at iteration {iteration} | lm loss value: {loss:.6E} | "
                f"lm loss PPL: {perplexity:.6E} |{bits}",
                flush=True,
            )
            values = {"iteration": iteration, "split": split, "lm_loss": loss, "perplexity": perplexity}
            self._append(values | ({"bits_per_byte": bits_per_byte} if bits_per_byte is not None else {}))
        if self.board is not None:
            self.board.add_scalar(f"lm-loss-{split}/lm loss", loss, iteration)

    def _append(self, values: dict[str, Any]) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # JSON has no word for NaN and infinity
            values = {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")

    def _write_board(self, values: dict[str, Any]) -> None:
        names = {
            "lm_loss": "lm-loss",
            "learning_rate": "learning-rate",
            "grad_norm": "grad-norm",
            "loss_scale": "loss-scale",
        }
        for key, name in names.items():
            if values[key] is not None:
                self.board.add_scalar(f"{name}/{name}", values[key], values["iteration"])
                self.board.add_scalar(f"{name}/{name} vs samples", values[key], values["consumed_samples"])

    def close(self) -> None:
        if self.board is not None:
            self.board.close()


def _mean_loss(losses: list[float], newest: float) -> float | None:
    """The mean over the steps of an interval that were not skipped. Where all were, nothing, unless the newest loss is
    NaN or infinite: that is said as such."""
    if losses:
        return sum(losses) / len(losses)
    return None if math.isfinite(newest) else newest


class PausedClock:
    """Stops the step clock of a writer while it is entered."""

    def __init__(self, writer: MetricsWriter):
        self.writer = writer

    def __enter__(self) -> None:
        self.entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.writer.since += time.perf_counter() - self.entered


def metrics_path(config: Config) -> Path | None:
    """Where the run's metrics go: ``--metrics-file``, else beside the checkpoints; nowhere where nothing is saved."""
    if config.logging.metrics_file:
        return Path(config.logging.metrics_file)
    save = None if config.training.skip_train else config.checkpoint.save
    return Path(save) / METRICS if save else None


def drop_lines_beyond(path: Path, iteration: int) -> None:
    """Keep what was written up to ``iteration``, so that each iteration appears once; nothing for a run from the start.

    Raises:
        ConfigError: a line is not one of a metrics file. (The last may be cut short, by a kill.)
    """
    lines = path.read_text(errors="replace").splitlines()
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            if json.loads(line)["iteration"] <= iteration and iteration > 0:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            if number < len(lines) or number == 1:
                raise ConfigError(
                    f"--metrics-file ({path}) holds a line that is none of a metrics file: line {number}, "
                    f"{line[:60]!r}. Give another path"
                ) from None
    if len(kept) < len(lines):
        print(f"{path}: {len(lines) - len(kept)} lines beyond iteration {iteration} are dropped", flush=True)
        write_atomically(path, "".join(line + "\n" for line in kept))


def format_duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
