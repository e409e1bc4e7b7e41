"""How kernels are launched: one place for the device guard, launch options and the choice of configurations.

Nothing is tuned at run time: a configuration is a pure function of op, dtype, shape and device (``tables.py``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from trimegatron.kernels import tables
from trimegatron.kernels.configs import Config
from trimegatron.kernels.static_launch import StaticLaunch, ordinary_launch

# Shared memory that a loop's load buffers may take: fits every architecture from sm_80 on, consumer cards included.
_PIPELINE_BYTES = 68 << 10


def configure(op: str, heuristic: Config, x: torch.Tensor, **shape: int) -> Config:
    """The configuration of ``op`` for tensors like ``x``: of a table, or ``heuristic``. ``shape`` holds the sizes and
    variants that ``configs.py`` names for the op, in one order in all calls; all that a table may not set follows from
    it."""
    choice = tables.choices.get(x.device) or tables.choice_of(x.device)
    return choice.config(op, heuristic, x.dtype, shape) if choice.settings else heuristic


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU. The interpreter, which runs programs one after another, counts as 2."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def architecture(device: torch.device) -> int:
    """Compute capability of a GPU as in sm_80. Anything else counts as the oldest the kernels are made for."""
    if device.type != "cuda" or torch.version.cuda is None:
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def pipeline_stages(bytes_per_stage: int, most: int = 3) -> int:
    """Stages of a loop whose loads take ``bytes_per_stage``: n stages hold n - 1 buffers."""
    return 1 + min(most - 1, _PIPELINE_BYTES // max(1, bytes_per_stage))


_launches: dict[int, StaticLaunch] = {}
"""Of each kernel by its id, which stays its own since the launch holds the kernel; hashing one costs microseconds."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, config: Config, **constexprs: Any) -> None:
    """Run ``kernel`` on the device of its first tensor, whichever is current, and on that device's current stream.
    The constants are the kernel's last parameters; what is a tensor (or None), an int or a float in one
    call is that in all."""
    first = args[0] if args[0] is not None else next(a for a in args if isinstance(a, torch.Tensor))
    device = first.get_device()
    if device < 0:  # the interpreter
        ordinary_launch(kernel, grid, args, config, constexprs)
        return
    static = _launches.get(id(kernel))
    if static is None:
        static = _launches.setdefault(id(kernel), StaticLaunch(kernel))
    static(device, grid, args, config, constexprs)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` and 1."""
    return triton.next_power_of_2(max(1, n))


def signed_word(word: int) -> int:
    """A 32-bit word as Triton takes it without a second compilation for large values: int32 with the same bits."""
    return word - (1 << 32) if word >= 1 << 31 else word
