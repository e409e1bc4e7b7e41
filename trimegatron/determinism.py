"""``--deterministic-mode``: the same command gives the same bits on a GPU, too.

On the CPU it does anyway, and so do the Triton kernels: none adds atomically. What is left on a GPU is torch's own
operators, the matrix products' work space, and the order in which NCCL adds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from trimegatron.errors import ConfigError

CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""The settings with which cuBLAS is deterministic (its documentation, "Results reproducibility")."""
NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
"""Those Megatron-LM accepts in its deterministic mode."""


def make_deterministic(device: torch.device) -> str:
    """Set torch, cuBLAS and NCCL up, before any of them has started on the device; returns what was done, for the log.

    torch takes the deterministic form of an operator, and raises where there is none: never silently.
    Scaled dot product attention leaves cuDNN out by itself then.

    Raises:
        ConfigError: the environment asks for a setting that is not deterministic.
    """
    torch.use_deterministic_algorithms(True)
    if device.type == "cpu":
        return "--deterministic-mode: on the CPU every run is deterministic without it"
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    chosen = deterministic_environment(os.environ)
    os.environ |= chosen
    return "--deterministic-mode: torch's deterministic operators, " + ", ".join(f"{k}={v}" for k, v in chosen.items())


def deterministic_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What the two variables must be: as they are where that is deterministic, else our choice.

    Raises:
        ConfigError: one is set to something else.
    """
    chosen = {}
    for name, allowed in (("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES), ("NCCL_ALGO", NCCL_ALGORITHMS)):
        value = environment.get(name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"--deterministic-mode needs the environment variable {name} ({value}) to be one of "
                f"{', '.join(allowed)}. Unset it, or leave the option out"
            )
        chosen[name] = value
    return chosen
