"""``trimegatron demo``: the whole workflow on this machine, with no download.

The corpus is the Python standard library's own source: what CodeParrot is trained on, in small. Every step is a
command that a user would type; each is printed before it runs.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from trimegatron.config.flags import parse
from trimegatron.config.options import Options, option
from trimegatron.errors import ConfigError, UserError, complain

PROMPT = "def __init__(self"
MINIMUM_MODULES = 100
"""Fewer are too small a corpus: some distributions keep the library in an archive."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig(Options):
    """Demonstration"""

    out: str = option("trimegatron-demo", "folder that receives everything; it must not exist yet, or be empty")


@dataclass(frozen=True)
class Scale:
    """How the demo trains on the hardware at hand."""

    description: str
    num_processes: int
    vocab_size: int
    flags: str


CPU = Scale(
    "no GPU found: 2 processes on the CPU (gloo), tensor parallel 2",
    num_processes=2,
    vocab_size=4096,
    flags="""--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
        --micro-batch-size 8 --global-batch-size 8 --train-iters 1500 --lr 0.003 --min-lr 0.0003 --lr-warmup-iters 60
        --eval-interval 500 --eval-iters 48 --log-interval 100""",
)

GPU = """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
        --micro-batch-size 32 --global-batch-size 32 --train-iters 1200 --lr 0.001 --min-lr 0.0001 --lr-warmup-iters 100
        --eval-interval 250 --eval-iters 12 --log-interval 50 --bf16"""


def main(argv: list[str]) -> int:
    """Run every step; returns the exit code of the first that fails."""
    (config,) = parse(argv, DemoConfig, prog="trimegatron demo", description=__doc__ or "")
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out ({out}) must not exist yet, or be empty. Give another folder, or remove it first")
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    scale = choose_scale()
    print(f"trimegatron demo, in {out}: {scale.description}")
    write_corpus(out / "stdlib.jsonl")
    for title, command in steps(out, scale):
        print(f"\n== {title}\n$ {command}", flush=True)
        code = subprocess.run(as_run(command), check=False).returncode
        if code != 0:
            complain("demo", f"this step ended with exit code {code}")
            return code
    first, last = validation_losses(out / "checkpoints" / "metrics.jsonl")
    print(
        f"\nDone in {time.monotonic() - started:.0f} s. Validation loss {first['lm_loss']:.3f} before the first step, "
        f"{last['lm_loss']:.3f} after the last ({last['lm_loss'] / first['lm_loss']:.0%}); bits per byte "
        f"{first['bits_per_byte']:.2f} and {last['bits_per_byte']:.2f}.\n"
        f"Everything is in {out}: {', '.join(contents(out))}."
    )
    return 0


def choose_scale() -> Scale:
    """The CPU's, or where there are GPUs a larger run on one or two of them."""
    import torch

    if not torch.cuda.is_available():
        return CPU
    num_processes = min(2, torch.cuda.device_count())
    name = torch.cuda.get_device_name(0)
    where = f"{num_processes} × {name}, tensor parallel {num_processes}, bf16, Triton kernels"
    return Scale(where, num_processes, vocab_size=8192, flags=GPU)


def write_corpus(path: Path) -> None:
    """The standard library's modules as loose JSON, one a line, with their text under ``content``."""
    root = Path(sysconfig.get_path("stdlib"))
    modules = standard_library(root)
    random.Random(0).shuffle(modules)  # the splits are ranges of documents: each should hold a bit of everything
    written = skipped = 0
    with path.open("w", encoding="utf-8") as file:
        for module in modules:
            try:
                text = module.read_text(encoding="utf-8")
            except UnicodeDecodeError:  # the library's tests hold such files on purpose
                skipped += 1
                continue
            file.write(json.dumps({"content": text, "path": str(module.relative_to(root))}) + "\n")
            written += 1
    if written < MINIMUM_MODULES:
        raise UserError(
            f"the standard library in {root} has only {written} modules as files: too few for a demonstration"
        )
    print(
        f"{path}: {written} modules of the standard library, {path.stat().st_size / 1e6:.1f} MB "
        f"({skipped} that are not UTF-8 left out)"
    )


def standard_library(root: Path) -> list[Path]:
    """The modules under ``root``, without what users installed."""
    return [module for module in sorted(root.rglob("*.py")) if "site-packages" not in module.parts]


def steps(out: Path, scale: Scale) -> list[tuple[str, str]]:
    """Title and command of each step, as a user would type them."""
    folder = shlex.quote(str(out))
    tokenizer = f"--vocab-file {folder}/tokenizer/vocab.json --merge-file {folder}/tokenizer/merges.txt"
    flags = " ".join(scale.flags.split())
    return [
        (
            "Train a byte-level BPE tokenizer",
            f"trimegatron tokenizer train --input {folder}/stdlib.jsonl --json-keys content "
            f"--vocab-size {scale.vocab_size} --output {folder}/tokenizer",
        ),
        (
            "Preprocess: text to token ids",
            f"trimegatron preprocess --input {folder}/stdlib.jsonl --output-prefix {folder}/stdlib --json-keys content "
            f"--tokenizer-type GPT2BPETokenizer {tokenizer} "
            "--append-eod --workers 2 --chunk-size 25 --log-interval 500",
        ),
        (
            "Train, evaluate, save",
            f"torchrun --nproc-per-node {scale.num_processes} -m trimegatron.train "
            f"--tensor-model-parallel-size {scale.num_processes} {flags} "
            f"--lr-decay-style cosine --weight-decay 0.1 --adam-beta2 0.98 --attention-dropout 0 --hidden-dropout 0 "
            f"--data-path {folder}/stdlib_content_document --split 95,5,0 {tokenizer} --num-workers 0 --eval-at-start "
            f"--save {folder}/checkpoints --save-interval 5000 --load {folder}/checkpoints",
        ),
        (
            "Convert to Hugging Face; the proof loads the result with AutoModelForCausalLM in a fresh process",
            f"trimegatron convert to-hf --load {folder}/checkpoints --output {folder}/hf",
        ),
        (
            "Generate",
            f"trimegatron generate --load {folder}/checkpoints --prompt {shlex.quote(PROMPT)} --max-new-tokens 120 "
            "--temperature 0.7 --top-k 40",
        ),
    ]


def as_run(command: str) -> list[str]:
    """The printed command with this very Python behind it, so that it works in an environment that is not activated."""
    program, *words = shlex.split(command)
    module = {"trimegatron": "trimegatron", "torchrun": "torch.distributed.run"}[program]
    return [sys.executable, "-m", module, *words]


def validation_losses(metrics: Path) -> tuple[dict, dict]:
    """The first and the last evaluation on the validation split."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [line for line in lines if line.get("split") == "valid"]
    return evaluations[0], evaluations[-1]


def contents(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())
