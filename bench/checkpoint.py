"""``trimegatron bench checkpoint``: time and memory of saving and loading a model with its optimizer state, beside the
speed at which the disk writes and flushes, and reads, as many bytes.

Each figure is of a process of its own, the kinds taking turns; of several rounds the table shows the fastest. What is
read was dropped from the system's cache before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimegatron.bench.measure import Contender, Figures, in_turns, machine
from trimegatron.bench.results import OURS, Result, measured
from trimegatron.bench.runner import run
from trimegatron.checkpoint.checkpoint import load_checkpoint
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

CASES = {
    "write": ("save", "the disk alone"),
    "save": ("save", OURS),
    "read": ("load", "the disk alone"),
    "load": ("load", OURS),
    "load, hashes not compared": ("load", f"{OURS}, hashes not compared"),
}
"""What is run → the case and the variant."""
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
        case, variant = CASES[kind]
        note = f"{runs[0]['bytes'] / 1e9:.3f} GB"
        yield measured(case, variant, "time", "s", [run["seconds"] for run in runs], note=note, **sizes)
        if variant != "the disk alone":
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
    }
    return in_turns(kinds, config.rounds)


def contender(function: str, **arguments: Any) -> Contender:
    return Contender(f"trimegatron.bench.checkpoint:{function}", arguments)


def report(figures: dict[str, list[Figures]]) -> str:
    """Seconds, speed, ratio to the disk's own, and the memory beyond what was there before."""
    fastest = {name: min(runs, key=lambda run: run["seconds"]) for name, runs in figures.items()}
    here = machine()
    lines = [
        f"{here['cpu']}, {here['cores']} cores, load {here['load_average'][0]:.1f}",
        f"{'':28} {'GB':>6} {'s':>8} {'GB/s':>6} {'ratio':>6} {'memory beyond, GB':>18}",
    ]
    for name, best in fastest.items():
        disk = fastest["write" if name in ("write", "save") else "read"]
        gigabytes = best["bytes"] / 1e9
        lines.append(
            f"{name:28} {gigabytes:6.3f} {best['seconds']:8.3f} {gigabytes / best['seconds']:6.2f} "
            f"{best['seconds'] / disk['seconds']:6.2f} {best['memory'] / 1e9:18.3f}"
        )
    return "\n".join(lines)


def write(*, path: str, num_bytes: int) -> Figures:
    """As many bytes of noise, written and flushed."""
    noise = os.urandom(PIECE)
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:  # noqa: PTH123
        for at in range(0, num_bytes, PIECE):
            file.write(noise[: num_bytes - at])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    Path(path).unlink()
    return {"bytes": num_bytes, "seconds": seconds, "memory": 0}


def read(*, folder: str) -> Figures:
    """The tensor files of a checkpoint, into one buffer."""
    paths = drop_from_cache(Path(folder))
    buffer = bytearray(PIECE)
    num_bytes = 0
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return {"bytes": num_bytes, "seconds": time.perf_counter() - started, "memory": 0}


def save(*, folder: str, **sizes: int) -> Figures:
    """A checkpoint of a model at its start, by the trainer; what it leaves replaces that of the run before."""
    shutil.rmtree(folder, ignore_errors=True)
    trainer = build(Path(folder), sizes)
    before = peak_memory_bytes(torch.device("cpu"))
    started = time.perf_counter()
    trainer.save()
    seconds = time.perf_counter() - started
    return {
        "bytes": sum(path.stat().st_size for path in Path(folder).glob("c/iter_*/*.safetensors")),
        "seconds": seconds,
        "memory": peak_memory_bytes(torch.device("cpu")) - before,
    }


def load(*, folder: str, verify: bool = True, **sizes: int) -> Figures:
    """That checkpoint into a model like it, chosen and read as a run that resumes does."""
    trainer = build(Path(folder), sizes, load=True, verify=verify)
    before = peak_memory_bytes(torch.device("cpu"))
    paths = drop_from_cache(Path(folder) / "c" / "iter_0000000")
    started = time.perf_counter()
    found = choose_checkpoint(trainer.config, trainer.mesh, print)
    assert found is not None
    load_checkpoint(found, config=trainer.config, optimizer=trainer.optimizer, mesh=trainer.mesh, with_optimizer=True)
    return {
        "bytes": sum(path.stat().st_size for path in paths),
        "seconds": time.perf_counter() - started,
        "memory": peak_memory_bytes(torch.device("cpu")) - before,
    }


def build(folder: Path, sizes: dict[str, int], *, load: bool = False, verify: bool = True) -> Trainer:
    """A trainer of the model on a few tokens, with moments that are not all zero."""
    prefix = folder / "text"
    folder.mkdir(parents=True, exist_ok=True)
    seq_length = min(16, sizes["max_position_embeddings"])
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(np.zeros(64 * seq_length, np.uint16), [64 * seq_length])
    flags = {
        **sizes,
        "vocab_size": sizes["vocab_size"] - 1,  # and the end of documents
        "seq_length": seq_length,
        "tokenizer_type": "NullTokenizer",
        "data_path": prefix,
        "split": "1,0,0",
        "micro_batch_size": 1,
        "train_iters": 1,
        "eval_iters": 0,
        "lr": 1e-3,
        "save": folder / "c",
        "save_interval": 1,
        "device": "cpu",
    }
    words = [word for name, value in flags.items() for word in (kebab(name), str(value))]
    words += [
        "--bf16",
        *(["--load", str(folder / "c")] if load else []),
        *([] if verify else ["--no-verify-checkpoint"]),
    ]
    config = parse_train_args(words, world_size=1)
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
