"""What checkpoints a folder holds, as a table."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from trimegatron.checkpoint.checkpoint import CheckpointState
from trimegatron.checkpoint.directory import (
    MANIFEST,
    checkpoints,
    is_one_checkpoint,
    iteration_of,
    manifest_files,
    problem_with,
    tracked_iteration,
)
from trimegatron.errors import CheckpointError

HEADINGS = ("iteration", "date", "size", "layout", "samples", "tokens", "dtype", "loss scale", "state")


def checkpoints_of(root: Path) -> list[Path]:
    """The checkpoint that ``root`` is, or those in it, complete or not, from the first to the last.

    Raises:
        CheckpointError: there is none.
    """
    found = [root] if is_one_checkpoint(root) else sorted(checkpoints(root), key=iteration_of)
    if not found:
        raise CheckpointError(f"{root} holds no checkpoint. Give the folder that a run saved into with --save")
    return found


def table(root: Path) -> str:
    """A line for each checkpoint. "newest" is what ``--load`` takes: the one that the tracker names."""
    rows = [HEADINGS, *(row(folder, tracked_iteration(folder.parent)) for folder in checkpoints_of(root))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) for row in rows)
    return "\n".join([str(root), *(f"  {line}  {row[-1]}" for line, row in zip(lines, rows, strict=True))])


def row(folder: Path, tracked: int | None) -> tuple[str, ...]:
    """What :data:`HEADINGS` head."""
    problem = problem_with(folder)
    try:
        state = CheckpointState.read(folder)
        date = datetime.fromtimestamp((folder / MANIFEST).stat().st_mtime).isoformat(" ", "seconds")
        size = sum(entry["bytes"] for entry in manifest_files(folder).values())
    except (CheckpointError, OSError, ValueError, KeyError):
        return folder.name.removeprefix(".").removeprefix("iter_"), *["-"] * 7, problem or "cannot be read"
    progress, config = state.progress, state.config
    precision = config["precision"]
    return (
        str(progress.iteration),
        date,
        f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB",
        layout(config["parallel"]),
        str(progress.consumed_samples),
        str(progress.consumed_samples * config["data"]["seq_length"]),
        "fp16" if precision["fp16"] else "bf16" if precision["bf16"] else "fp32",
        f"{state.scaler.get('scale', 1.0):g}",
        problem or ("complete, newest" if progress.iteration == tracked else "complete"),
    )


def layout(parallel: dict) -> str:
    """``dp2 tp2 pp1``, with what else cuts a checkpoint's tensors."""
    tp, pp = parallel["tensor_model_parallel_size"], parallel["pipeline_model_parallel_size"]
    words = [f"dp{parallel['world_size'] // (tp * pp)}", f"tp{tp}", f"pp{pp}"]
    if parallel["num_layers_per_virtual_pipeline_stage"]:
        words.append("interleaved")
    if parallel["use_distributed_optimizer"]:
        words.append("sharded")
    return " ".join(words)
