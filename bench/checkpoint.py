"""``trimegatron bench checkpoint``: time and memory of saving and loading a model with its optimizer state, beside the
speed at which the disk writes and flushes, and reads, as many bytes; and with ``--async-save`` how long training waits
for a save, beside a copy of as many bytes in memory, when the checkpoint is whole, and what steps take until then.

Each figure is of a process of its own, the kinds taking turns; of several rounds the table shows the fastest. What is
read was dropped from the system's cache before; and as many bytes of memory were used and given back, which a virtual
machine may have to ask its host for.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimegatron.bench.measure import Contender, Figures, in_turns, machine
from trimegatron.bench.results import OURS, Result, measured
from trimegatron.bench.runner import run
from trimegatron.checkpoint.checkpoint import load_checkpoint
from trimegatron.checkpoint.directory import TRACKER, tracked_iteration
from trimegatron.checkpoint.resume import choose_checkpoint
from trimegatron.config import parse_train_args
from trimegatron.config.options import Options, kebab, option
from trimegatron.data.indexed_writer import IndexedDatasetWriter
from trimegatron.mesh import Mesh
from trimegatron.metrics import peak_memory_bytes
from trimegatron.preflight import with_vocab_size
from trimegatron.tokenizer import build_tokenizer
from trimegatron.train import build_trainer
from trimegatron.trainer import Trainer

DISK, COPY = "the disk alone", "a copy of as many bytes"
CASES = {
    "write": ("save", DISK, "write"),
    "save": ("save", OURS, "write"),
    "read": ("load", DISK, "read"),
    "load": ("load", OURS, "read"),
    "load, hashes not compared": ("load", f"{OURS}, hashes not compared", "read"),
    "copy": ("pause of training", COPY, "copy"),
    "pause": ("pause of training", OURS, "copy"),
    "whole": ("save beside training", OURS, "write"),
    "step": ("step", f"{OURS}, nothing is written", "step"),
    "step beside a save": ("step", f"{OURS}, beside a save", "step"),
}
"""What is timed → the case, the variant, and what the table divides its time by."""
BESIDE = ("pause", "whole", "step", "step beside a save")
"""What a process finds that saves beside training."""
STEPS = 5
"""Timed with nothing beside them, after one that is not."""
PIECE = 1 << 24
"""Bytes of one write or read of the raw test."""


@dataclass(frozen=True, kw_only=True)
class CheckpointBenchConfig(Options):
    """Checkpoints beside the disk

    The default is GPT-2 of 110 M parameters in bf16: 14 bytes a parameter."""

    num_layers: int = option(12, "transformer layers", minimum=1)
    hidden_size: int = option(768, "width of the model", unit="features", minimum=1)
    num_attention_heads: int = option(12, "attention heads", minimum=1)
    max_position_embeddings: int = option(1024, "rows of the position table", unit="tokens", minimum=1)
    vocab_size: int = option(32768, "words", minimum=1)
    rounds: int = option(3, "runs of each kind", minimum=1)
    work_dir: str | None = option(None, "folder on the disk to measure", derived="the system's temporary one")


def main(argv: list[str]) -> int:
    """Measure in turns, report."""
    sweeps = {"hidden_size": (48, 192, 768)}
    return run(
        "checkpoint", argv, CheckpointBenchConfig, results, description=__doc__, sweeps=sweeps,
        packages=("safetensors",), show=None,
    )  # fmt: skip


def results(config: CheckpointBenchConfig) -> Iterator[Result]:
    """Time and memory of each kind."""
    folder = Path(tempfile.mkdtemp(prefix="trimegatron-checkpoint-", dir=config.work_dir))
    try:
        figures = measure(config, folder)
    finally:
        shutil.rmtree(folder)
    print(report(figures))
    sizes = {name: value for name, value in asdict(config).items() if name not in ("rounds", "work_dir")}
    for kind, runs in figures.items():
        case, variant, _ = CASES[kind]
        note = f"{runs[0]['bytes'] / 1e9:.3f} GB"
        seconds = [run["seconds"] for run in runs]
        yield measured(case, variant, "time", "s", seconds, note=note, **sizes)
        if kind == "save":
            yield measured(CASES["pause"][0], f"{OURS}, without --async-save", "time", "s", seconds, note=note, **sizes)
        if "memory" in runs[0]:
            memory = [run["memory"] for run in runs]
            yield measured(case, variant, "memory beyond the model", "bytes", memory, note=note, **sizes)


def measure(config: CheckpointBenchConfig, folder: Path) -> dict[str, list[Figures]]:
    """Each kind ``config.rounds`` times. The first save says how many bytes the disk is given."""
    sizes = {name: value for name, value in asdict(config).items() if name not in ("rounds", "work_dir")}
    first = contender("save", folder=str(folder / "first"), **sizes).run()
    saved = str(folder / "first" / "c" / "iter_0000000")
    kinds = {
        "write": contender("write", path=str(folder / "raw"), num_bytes=first["bytes"]),
        "save": contender("save", folder=str(folder / "again"), **sizes),
        "read": contender("read", folder=saved),
        "load": contender("load", folder=str(folder / "first"), **sizes),
        "load, hashes not compared": contender("load", folder=str(folder / "first"), verify=False, **sizes),
        "copy": contender("copy", num_bytes=first["bytes"]),
        "beside": contender("save_beside", folder=str(folder / "beside"), **sizes),
    }
    figures = in_turns(kinds, config.rounds)
    beside = figures.pop("beside")
    return figures | {name: [run[name] for run in beside] for name in BESIDE}


def contender(function: str, **arguments: Any) -> Contender:
    return Contender(f"trimegatron.bench.checkpoint:{function}", arguments)


def report(figures: dict[str, list[Figures]]) -> str:
    """Seconds, speed, ratio to the least there can be, and the memory beyond what was there before."""
    fastest = {name: min(runs, key=lambda run: run["seconds"]) for name, runs in figures.items()}
    here = machine()
    lines = [
        f"{here['cpu']}, {here['cores']} cores, load {here['load_average'][0]:.1f}",
        f"{'':28} {'GB':>6} {'s':>8} {'GB/s':>6} {'ratio':>6} {'memory beyond, GB':>18}",
    ]
    for name, best in fastest.items():
        gigabytes, seconds = best["bytes"] / 1e9, best["seconds"]
        ratio = seconds / fastest[CASES[name][2]]["seconds"]
        size, speed = ("", "") if CASES[name][0] == "step" else (f"{gigabytes:.3f}", f"{gigabytes / seconds:.2f}")
        memory = f"{best['memory'] / 1e9:.3f}" if "memory" in best else ""
        lines.append(f"{name:28} {size:>6} {seconds:8.3f} {speed:>6} {ratio:6.2f} {memory:>18}")
    return "\n".join(lines)


def write(*, path: str, num_bytes: int) -> Figures:
    """As many bytes of noise, written and flushed."""
    noise = os.urandom(PIECE)
    use_memory(num_bytes)
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:  # noqa: PTH123
        for at in range(0, num_bytes, PIECE):
            file.write(noise[: num_bytes - at])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    Path(path).unlink()
    return {"bytes": num_bytes, "seconds": seconds}


def read(*, folder: str) -> Figures:
    """The tensor files of a checkpoint, into one buffer."""
    paths = drop_from_cache(Path(folder))
    buffer = bytearray(PIECE)
    use_memory(sum(path.stat().st_size for path in paths))
    num_bytes = 0
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return {"bytes": num_bytes, "seconds": time.perf_counter() - started}


def copy(*, num_bytes: int) -> Figures:
    """As many bytes from memory to memory, both written to before."""
    source, target = torch.ones(2, num_bytes // 4)
    return {"bytes": num_bytes, "seconds": timed(lambda: target.copy_(source))}


def save(*, folder: str, **sizes: int) -> Figures:
    """A checkpoint of a model at its start, by the trainer; what it leaves replaces that of the run before."""
    shutil.rmtree(folder, ignore_errors=True)
    trainer = build(Path(folder), sizes)
    use_memory(trainer.snapshot().num_bytes)
    before = peak_memory_bytes(torch.device("cpu"))
    seconds = timed(trainer.save)
    return {
        "bytes": bytes_in(Path(folder) / "c"),
        "seconds": seconds,
        "memory": peak_memory_bytes(torch.device("cpu")) - before,
    }


def save_beside(*, folder: str, **sizes: int) -> Figures:
    """The same with ``--async-save`` after some steps, and steps until it is whole: each of ``BESIDE``."""
    shutil.rmtree(folder, ignore_errors=True)
    trainer = build(Path(folder), sizes, "--async-save")
    root = Path(folder) / "c"
    before = peak_memory_bytes(torch.device("cpu"))
    trainer.saver.reserve(trainer.snapshot())
    memory = peak_memory_bytes(torch.device("cpu")) - before
    with closing(trainer.loader(trainer.datasets.train, 0)) as batches:
        step = partial(trainer.train_step, batches)
        alone = [timed(step) for _ in range(1 + STEPS)][1:]
        trainer.progress.iteration = 1 + STEPS
        use_memory(trainer.snapshot().num_bytes)
        started = time.time()  # as files tell it
        pause = timed(trainer.save)
        beside = [timed(step)]
        while tracked_iteration(root) is None:
            beside.append(timed(step))
    trainer.saver.wait()
    num_bytes = bytes_in(root)
    return {
        "pause": {"bytes": num_bytes, "seconds": pause},
        "whole": {"bytes": num_bytes, "seconds": (root / TRACKER).stat().st_mtime - started, "memory": memory},
        "step": {"bytes": num_bytes, "seconds": statistics.median(alone)},
        "step beside a save": {"bytes": num_bytes, "seconds": statistics.median(beside)},
    }


def use_memory(num_bytes: int) -> None:
    """Fill memory and give it back; in another process, for this one's peak is measured."""
    subprocess.run([sys.executable, "-c", f"b'1' * {num_bytes}"], check=True)


def timed(run: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def bytes_in(root: Path) -> int:
    """Of the tensor files of the checkpoints in a folder."""
    return sum(path.stat().st_size for path in root.glob("iter_*/*.safetensors"))


def load(*, folder: str, verify: bool = True, **sizes: int) -> Figures:
    """That checkpoint into a model like it, chosen and read as a run that resumes does."""
    trainer = build(Path(folder), sizes, "--load", f"{folder}/c", *([] if verify else ["--no-verify-checkpoint"]))
    before = peak_memory_bytes(torch.device("cpu"))
    paths = drop_from_cache(Path(folder) / "c" / "iter_0000000")
    use_memory(sum(path.stat().st_size for path in paths))
    started = time.perf_counter()
    found = choose_checkpoint(trainer.config, trainer.mesh, print)
    assert found is not None
    load_checkpoint(found, config=trainer.config, optimizer=trainer.optimizer, mesh=trainer.mesh, with_optimizer=True)
    return {
        "bytes": sum(path.stat().st_size for path in paths),
        "seconds": time.perf_counter() - started,
        "memory": peak_memory_bytes(torch.device("cpu")) - before,
    }


def build(folder: Path, sizes: dict[str, int], *flags: str) -> Trainer:
    """A trainer of the model on a few tokens, with moments that are not all zero."""
    prefix = folder / "text"
    folder.mkdir(parents=True, exist_ok=True)
    seq_length = min(16, sizes["max_position_embeddings"])
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(np.zeros(64 * seq_length, np.uint16), [64 * seq_length])
    values = {
        **sizes,
        "vocab_size": sizes["vocab_size"] - 1,  # and the end of documents
        "seq_length": seq_length,
        "tokenizer_type": "NullTokenizer",
        "data_path": prefix,
        "split": "1,0,0",
        "micro_batch_size": 1,
        "train_iters": 1000,
        "eval_iters": 0,
        "lr": 1e-3,
        "save": folder / "c",
        "save_interval": 1,
        "device": "cpu",
    }
    words = [word for name, value in values.items() for word in (kebab(name), str(value))]
    config = parse_train_args([*words, "--bf16", *flags], world_size=1)
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=config.model.vocab_size)
    config = with_vocab_size(config, tokenizer)
    trainer = build_trainer(config, Mesh(torch.device("cpu")), tokenizer, None, lambda *_: None)
    for moment in (trainer.optimizer.exp_avg, trainer.optimizer.exp_avg_sq):
        moment.uniform_()
    return trainer


def drop_from_cache(folder: Path) -> list[Path]:
    """Have the system forget what it holds of a checkpoint's tensor files, where it can; the files."""
    paths = sorted(folder.glob("*.safetensors"))
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths
