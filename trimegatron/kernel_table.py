"""Which launch configurations the kernels of a run go by, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import torch

from trimegatron.config import Config
from trimegatron.errors import ConfigError
from trimegatron.kernels import tables
from trimegatron.mesh import Mesh


def runs_triton(config: Config, device: torch.device) -> bool:
    """Whether fused operations are Triton kernels: on a GPU, or in the interpreter where they are asked for."""
    kernels = config.model.kernels
    return kernels == "triton" or (kernels == "auto" and device.type == "cuda")


def use_kernel_table(config: Config, mesh: Mesh) -> list[str]:
    """Choose this rank's tables, and see that the others have come to the same configurations: with others a kernel
    adds in another order, and replicas would part.

    Returns:
        What the user should know, one line each.

    Raises:
        ConfigError: on every rank, if any rank's table cannot be used or ranks differ.
    """
    choice, error = tables.Choice(), ""
    notes: list[str] = []
    try:
        choice, notes = _choose(config, mesh.device)
    except tables.TableError as problem:
        error = f"--kernel-table: {problem}. Make one on this machine with trimegatron tune, or leave the option out"
    origin = ", ".join(str(table.path) for table in choice.tables) or "no table"
    ranks = mesh.gather((error, choice.digest, origin))
    if first := next((text for text, *_ in ranks if text), None):
        raise ConfigError(first)
    if len({digest for _, digest, _ in ranks}) > 1:
        raise ConfigError(f"--kernel-table must come to the same configurations on every rank; got {_by_digest(ranks)}."
                          " Give all nodes the same file and the same GPUs, or use --kernel-table none")  # fmt: skip
    return notes


def _choose(config: Config, device: torch.device) -> tuple[tables.Choice, list[str]]:
    """Raises TableError."""
    asked = config.model.kernel_table
    user = None if asked in (None, "none") else Path(asked)
    if not runs_triton(config, device):
        if user is not None:
            tables.read_table(user)
        return tables.Choice(), [f"--kernel-table has no effect: no Triton kernel runs on {device}."] if asked else []
    choice = tables.choose(device, user, packaged=asked != "none")
    notes = choice.warnings()
    if choice.settings:
        files = ", ".join(str(table.path) for table in choice.tables)
        notes.append(f"{len(choice.settings)} tuned kernel configurations from {files} (digest {choice.digest}).")
    elif user is not None:
        notes.append(f"--kernel-table ({user}) has no record that counts: every kernel goes by its heuristic.")
    return choice, notes


def _by_digest(ranks: list[tuple[str, str, str]]) -> str:
    """As in "3f… of a.json on rank 0; none of no table on rank 1, 2, 3"."""
    found: dict[tuple[str, str], list[str]] = {}
    for rank, (_, digest, origin) in enumerate(ranks):
        found.setdefault((digest, origin), []).append(str(rank))
    return "; ".join(f"{digest} of {origin} on rank {', '.join(on[:8])}{', …' if len(on) > 8 else ''}"
                     for (digest, origin), on in found.items())  # fmt: skip
