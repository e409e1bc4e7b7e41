"""The mesh of ranks: the only place where process groups are made.

Ranks are laid out as Megatron's: tensor parallel fastest, then data parallel, then pipeline parallel. With 16
ranks, tp=2 and pp=4, rank 5 is tensor 1, data 0, pipeline 1.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trimegatron.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    store: dist.Store | None = None

    @property
    def is_first_rank(self) -> bool:
        """The one rank that prints and writes what is written once."""
        return self.world.rank == 0

    def is_first_to(self, deed: str) -> bool:
        """True for the first rank that asks, False for all after it: what every rank may find, one of them says."""
        try:
            return self.store is None or self.store.add(f"trimegatron/{deed}", 1) == 1
        except dist.DistNetworkError:
            return False  # the rank that held the store is gone; it asked before it went

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world.group is not None:
            dist.barrier(group=self.world.group)


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
) -> Mesh:
    """Join the process group that torchrun's environment describes and cut it into (pipeline, data, tensor).

    A single process needs no environment and makes no process group. ``backend`` None means gloo on a CPU; on CUDA,
    NCCL for device tensors beside gloo for host tensors.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return Mesh(device)
    if backend is None:
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store, rank, world_size = next(dist.rendezvous("env://"))
    store.set_timeout(timedelta(minutes=timeout_minutes))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=timeout_minutes)
    )
    data_parallel_size = world_size // (tensor_parallel_size * pipeline_parallel_size)
    mesh = init_device_mesh(
        device.type,
        (pipeline_parallel_size, data_parallel_size, tensor_parallel_size),
        mesh_dim_names=("pp", "dp", "tp"),
    )

    def axis(name: str) -> Axis:
        size = mesh[name].size()
        return Axis(size, mesh.get_local_rank(name), mesh.get_group(name) if size > 1 else None)

    world = Axis(world_size, rank, dist.group.WORLD)
    return Mesh(device, world, axis("pp"), axis("dp"), axis("tp"), store)


def close_mesh() -> None:
    """Leave the process group, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
