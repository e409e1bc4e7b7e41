"""The mesh of ranks: the only place where process groups are made.

Ranks are laid out as Megatron's: tensor parallel fastest, then data parallel, then pipeline parallel. With 16
ranks, tp=2 and pp=4, rank 5 is tensor 1, data 0, pipeline 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trimegatron.errors import ConfigError
from trimegatron.store import RunStore, StoreLostError, has_agent_store, store_of_this_start

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


ROLL_CALL = 5.0
"""Seconds in which a rank that lives has heard of a failure (``watch.py``)."""


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh as one rank sees it. ``group`` is None where the size is 1: then every collective is
    skipped.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. Parallel code takes an :class:`Axis` or its group, never a global."""

    device: torch.device
    world: Axis = Axis()
    pipeline: Axis = Axis()
    data: Axis = Axis()
    tensor: Axis = Axis()
    embedding: Axis = Axis()
    """The two stages that hold the tied word table, first and last; size 1 everywhere else."""
    saving: Axis = Axis()
    """All ranks, over a group of its own: what ``--async-save`` talks through while training talks."""
    store: RunStore | None = None

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's pipeline stage computes the loss."""
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def is_first_rank(self) -> bool:
        """The one rank that prints and writes what is written once."""
        return self.world.rank == 0

    def decide(self, question: str, answer: Callable[[], str]) -> str:
        """What the first rank answers, on every rank, so that nodes that see different disks do not part."""
        if self.store is None:
            return answer()
        key = f"trimegatron/decision/{question}"
        if self.is_first_rank:
            self.store.set(key, answer())
        return self.store.get(key)

    def gather(self, value: Any, over: Axis | None = None) -> list[Any]:
        """Each rank's ``value``, on every rank; ``over`` is ``world`` or ``saving``."""
        over = over or self.world
        if over.group is None:
            return [value]
        values: list[Any] = [None] * over.size
        dist.all_gather_object(values, value, group=over.group)
        return values

    def maximum(self, value: float) -> float:
        """The largest of the ranks' values, on every rank."""
        if self.world.group is None:
            return value
        largest = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.world.group)
        return largest.item()

    def report_failure(self, exit_code: int) -> tuple[bool, int]:
        """Leave word that this rank fails: :meth:`RunStore.report_failure`."""
        return (True, exit_code) if self.store is None else self.store.report_failure(exit_code)

    def who_is_gone(self) -> str | None:
        """After a failure: whom this rank cannot reach any more, or None where all ranks live."""
        if self.store is None:
            return None
        try:
            gone = self.store.call_the_roll(ROLL_CALL)
        except StoreLostError as lost:
            return str(lost) if has_agent_store() else f"rank 0 is gone: {lost}"
        ranks = ", ".join(map(str, gone[:8])) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")
        return f"rank {ranks} is gone: killed, or its machine or its network" if gone else None

    def wait_until_known(self, seconds: float = 10.0) -> None:
        """Keep the store, where this rank holds it, until the others know that the run has failed, or for ``seconds``.

        Under torchrun its agent holds the store, and ends the others.
        """
        if self.store is not None and self.is_first_rank and not has_agent_store():
            with suppress(StoreLostError):
                self.store.call_the_roll(seconds)

    def without_groups(self) -> Mesh:
        """This place with no way to the others but the store. Gloo closes its connections when the last reference to a
        group goes."""
        return Mesh(self.device, Axis(self.world.size, self.world.rank), store=self.store)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world.group is not None:
            dist.barrier(group=self.world.group)


def launched_world_size() -> int:
    """Processes of the run, from the launcher's environment; 1 without a launcher.

    Raises:
        ConfigError: the environment is half a launcher's.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE ({text}) in the environment must be a number from 1 on; torchrun sets it")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(text) > 1 and missing:
        raise ConfigError(
            f"WORLD_SIZE is {text} but {', '.join(missing)} is not set. Start the processes with torchrun"
        )
    return int(text)


def select_device(name: str) -> torch.device:
    """The device of this rank: ``cpu``, ``cuda`` (by LOCAL_RANK), or ``auto``, which is CUDA where there is one.

    Raises:
        ConfigError: CUDA is asked for and is not there, or has fewer devices than this node has ranks.
    """
    available = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(
            f"--device ({name}) needs a GPU that torch {torch.__version__} can use; there is none. Use cpu"
        )
    num_devices, num_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if num_ranks > num_devices:
        raise ConfigError(
            f"--device ({name}) needs a GPU for each of the {num_ranks} processes of this machine; it has "
            f"{num_devices}. Start fewer processes, or use --device cpu"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def init_mesh(
    device: torch.device,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    backend: str | None = None,
    timeout_minutes: float = 10,
    async_save: bool = False,
) -> Mesh:
    """Join the process group that torchrun's environment describes and cut it into (pipeline, data, tensor).

    A single process needs no environment and makes no process group. ``backend`` None means gloo on a CPU; on CUDA,
    NCCL for device tensors beside gloo for host tensors.
    """
    if launched_world_size() == 1:
        return Mesh(device)
    if backend == "nccl" and device.type == "cpu":
        raise ConfigError("--distributed-backend (nccl) needs --device cuda; this run is on the CPU. Leave it out")
    if backend == "gloo" and device.type == "cuda" and pipeline_parallel_size > 1:
        raise ConfigError(
            "--distributed-backend (gloo) cannot send from GPU to GPU, as the stages of a pipeline do. Leave it out"
        )
    if backend is None:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(minutes=timeout_minutes)
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    if has_agent_store():
        store = store_of_this_start(store, rank, world_size, timeout.total_seconds())
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mesh = cut_mesh(
        device,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        store=RunStore(store, rank=rank, size=world_size, seconds=timeout.total_seconds()),
    )
    if async_save:
        mesh = replace(mesh, saving=Axis(world_size, rank, dist.new_group(backend="gloo")))
    return mesh


def cut_mesh(
    device: torch.device, *, tensor_parallel_size: int, pipeline_parallel_size: int, store: RunStore | None
) -> Mesh:
    """Cut the process group that this rank has joined into (pipeline, data, tensor)."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data_parallel_size = world_size // (tensor_parallel_size * pipeline_parallel_size)
    mesh = init_device_mesh(
        "cpu" if device.type == "meta" else device.type,
        (pipeline_parallel_size, data_parallel_size, tensor_parallel_size),
        mesh_dim_names=("pp", "dp", "tp"),
    )

    def axis(name: str) -> Axis:
        size = mesh[name].size()
        return Axis(size, mesh.get_local_rank(name), mesh.get_group(name) if size > 1 else None)

    world = Axis(world_size, rank, dist.group.WORLD)
    ranks = mesh.mesh  # [pp, dp, tp]
    embedding = Axis()
    if pipeline_parallel_size > 1:
        embedding = _axis_of(rank, ranks[[0, -1]].flatten(1).t().tolist())
    return Mesh(device, world, axis("pp"), axis("dp"), axis("tp"), embedding, store=store)


def _axis_of(rank: int, groups: list[list[int]]) -> Axis:
    """The axis of the one of ``groups`` that ``rank`` is in; every rank calls it with the same groups."""
    if len(groups[0]) == 1:
        return Axis()
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    return next((Axis(len(ranks), ranks.index(rank), mine) for ranks in groups if rank in ranks), Axis())


def close_mesh() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
