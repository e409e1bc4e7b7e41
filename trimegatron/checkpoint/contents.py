"""What a checkpoint should hold, by the configuration it was saved with, and whether it does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trimegatron.checkpoint.checkpoint import CheckpointState
from trimegatron.checkpoint.directory import MANIFEST, file_hash, manifest_files, problems_with, readable
from trimegatron.checkpoint.stored import covers, global_shape, stored_pieces
from trimegatron.config import Config
from trimegatron.errors import CheckpointError
from trimegatron.model.build import global_shapes


def saved_config(folder: Path) -> Config:
    """The configuration a checkpoint was trained with, as for one process."""
    saved = CheckpointState.read(folder).config
    with readable(folder):
        saved["parallel"] = {}
        saved["model"]["kernels"] = "auto"  # of the machine it was trained on, not of the model
        return Config.from_dict(saved)


def faults(folder: Path) -> Iterator[str]:
    """All that is wrong with one checkpoint: files missing, of another size, not the ones written, and tensors that
    are missing, of another shape, or not covered by their pieces.
    """
    problems = list(problems_with(folder))
    yield from problems
    if problems:
        return  # what follows would say the same of the same files
    listed = manifest_files(folder)
    for name, entry in listed.items():
        if file_hash(folder / name) != entry["sha256"]:
            yield f"{name} is damaged: its SHA-256 is not the manifest's"
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        if str(path.relative_to(folder)) not in listed:
            yield f"{path.relative_to(folder)} is not in the {MANIFEST}"
    try:
        yield from tensor_faults(folder)
    except CheckpointError as error:
        yield str(error)


def tensor_faults(folder: Path) -> Iterator[str]:
    """Every tensor that is not what the configuration asks for.

    Raises:
        CheckpointError: a header or ``state.json`` cannot be read.
    """
    stored = stored_pieces(folder)
    expected = expected_shapes(
        saved_config(folder), with_optimizer=any(name.startswith("optimizer.") for name in stored)
    )
    for name, shape in expected.items():
        if name not in stored:
            yield f"{name} is missing"
        elif not covers(stored[name], shape):
            together = list(global_shape(stored[name]))
            yield f"the pieces of {name} do not cover its shape {list(shape)}; together they are {together}"
    for name in sorted(stored.keys() - expected.keys()):
        yield f"{name} is a tensor that this model has not"


def expected_shapes(config: Config, *, with_optimizer: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint → its global shape."""
    prefixes = ["model"]
    if with_optimizer:
        prefixes += ["optimizer.exp_avg", "optimizer.exp_avg_sq"]
        if config.precision.params_dtype != "float32":
            prefixes.append("optimizer.master")
    shapes = global_shapes(config)
    return {f"{prefix}.{name}": shape for prefix in prefixes for name, shape in shapes.items()}
